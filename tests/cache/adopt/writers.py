"""Writers of dumps as the peers' own code leaves them, for states that transformers gives for one sample at a time."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Captured:
    """One sample: ids and mask (T); `outputs[k]` (T, hidden) of decoder layer k before any norm; `last`: after it."""

    input_ids: Tensor
    loss_mask: Tensor
    outputs: list[Tensor]
    last: Tensor


@torch.inference_mode()
def capture(model: PreTrainedModel, input_ids: Sequence[int], loss_mask: Sequence[bool]) -> Captured:
    """What a plain forward of one sample gives, the last layer's output from before the final norm."""
    ids = torch.tensor(input_ids)
    norm_inputs: list[Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: norm_inputs.append(inputs[0][0].clone()))
    states = model(ids[None], output_hidden_states=True).hidden_states
    hook.remove()
    outputs = [state[0].clone() for state in states[1:-1]] + norm_inputs
    return Captured(ids, torch.tensor(loss_mask, dtype=torch.long), outputs, states[-1][0].clone())


def write_speculators(folder: Path, samples: Sequence[Captured], layer_ids: Sequence[int]) -> None:
    """speculators c05b95b: prepare_data.py's `save_to_disk`, then data_generation_offline.py with the last layer.

    vLLM's connector saves {"hidden_states", "token_ids"} with save_file; datasets writes IPC streams of at most 1,000
    rows a batch, lists them in state.json, and narrows `input_ids` to int32.
    """
    (folder / "hidden_states").mkdir(parents=True)
    for i, sample in enumerate(samples):
        layers = [*(sample.outputs[k] for k in layer_ids), sample.outputs[-1]]
        tensors = {"hidden_states": torch.stack(layers, dim=1), "token_ids": sample.input_ids}
        save_file(tensors, folder / "hidden_states" / f"hs_{i}.safetensors")
    half = len(samples) // 2
    names = [f"data-{part:05d}-of-00002.arrow" for part in range(2)]
    for name, rows in zip(names, (samples[:half], samples[half:]), strict=True):
        table = pa.table(
            {
                "input_ids": pa.array([row.input_ids.tolist() for row in rows], pa.list_(pa.int32())),
                "loss_mask": pa.array([row.loss_mask.tolist() for row in rows], pa.list_(pa.int64())),
                "seq_len": [len(row.input_ids) for row in rows],
            }
        )
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": "torch", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))


def write_specforge(folder: Path, samples: Sequence[Captured], layer_ids: Sequence[int], eagle: bool = False) -> None:
    """SpecForge a6b6b02, HiddenStatesGenerator.generate: every record of a batch of 4 is padded with zeros.

    The DFlash layout has `hidden_states`, EAGLE-3's `aux_hidden_state` and `hidden_state`, each with a leading axis of
    1; every second batch here is written with --compress.
    """
    (folder / "vocab_mapping").mkdir(parents=True)
    torch.save({"d2t": torch.zeros(1), "t2d": torch.zeros(1)}, folder / "vocab_mapping" / "vocab_mapping.pt")
    for i, sample in enumerate(samples):
        batch = samples[i // 4 * 4 : i // 4 * 4 + 4]
        padding = max(len(other.input_ids) for other in batch) - len(sample.input_ids)
        states = torch.cat([sample.outputs[k] for k in layer_ids], dim=-1)
        noise = torch.full((padding, states.shape[1]), 7.0, dtype=states.dtype)  # what the target makes of padding
        aux = torch.cat([states, noise])[None]
        record = {
            "input_ids": torch.nn.functional.pad(sample.input_ids, (0, padding)),
            "loss_mask": torch.nn.functional.pad(sample.loss_mask, (0, padding)),
        }
        last = torch.nn.functional.pad(sample.last, (0, 0, 0, padding))[None]
        record |= {"aux_hidden_state": aux, "hidden_state": last} if eagle else {"hidden_states": aux}
        group = i // 20 * 20
        path = folder / f"rows_{group}-{group + 20}" / f"data_{i}.ckpt"
        path.parent.mkdir(exist_ok=True)
        if i // 4 % 2:
            with gzip.open(f"{path}.gz", "wb", compresslevel=6) as stream:
                torch.save(record, stream)
        else:
            torch.save(record, path)


def write_modelopt(folder: Path, samples: Sequence[Captured], layer_ids: Sequence[int], **changes: Any) -> None:
    """Model-Optimizer a2fbac7, compute_hidden_states_hf.py's dump_hidden_states; `changes` replace keys, None drops."""
    folder.mkdir(parents=True)
    for i, sample in enumerate(samples):
        record = {
            "input_ids": sample.input_ids,
            "hidden_states": sample.last,
            "aux_hidden_states": torch.cat([sample.outputs[k] for k in layer_ids], dim=-1),
            "loss_mask": sample.loss_mask,
            "conversation_id": f"chat-{i}",
        } | changes
        with (folder / f"chat-{i}.pt").open("wb") as stream:
            torch.save({key: value for key, value in record.items() if value is not None}, stream)


def write_deepspec(folder: Path, samples: Sequence[Captured], layer_ids: Sequence[int], shard_size: int = 9) -> None:
    """DeepSpec afdfa7c, target_cache_dataset.py: pack_index_record, write_sample_bytes, build_target_cache_manifest."""
    record = Struct("<QIIQQQQQ")
    folder.mkdir(parents=True)
    shards: list[bytearray] = []
    index = bytearray()
    for i, sample in enumerate(samples):
        if i % shard_size == 0:
            shards.append(bytearray())
        states = torch.cat([sample.outputs[k] for k in layer_ids], dim=-1).to(torch.bfloat16).contiguous()
        parts = [
            sample.input_ids.to(torch.int32).numpy().tobytes(),
            torch.ones(len(sample.input_ids), dtype=torch.uint8).numpy().tobytes(),
            sample.loss_mask.to(torch.uint8).numpy().tobytes(),
            states.view(torch.uint16).numpy().tobytes(),
            sample.last.to(torch.bfloat16).contiguous().view(torch.uint16).numpy().tobytes(),
        ]
        offsets = []
        for part in parts:
            offsets.append(len(shards[-1]))
            shards[-1] += part
        index += record.pack(i, len(shards) - 1, len(sample.input_ids), *offsets)
    for number, data in enumerate(shards):
        (folder / f"shard-{number:05d}.bin").write_bytes(data)
    (folder / "samples.idx").write_bytes(index)
    manifest = {
        "version": 2,
        "num_samples": len(samples),
        "num_shards": len(shards),
        "target_layer_ids": list(layer_ids),
        "hidden_dtype": "bfloat16",
        "token_dtype": "int32",
        "mask_dtype": "uint8",
        "index_record_size": record.size,
        "hidden_size": samples[0].last.shape[1],
        "shards": [{"shard_id": n, "file_name": f"shard-{n:05d}.bin"} for n in range(len(shards))],
        "target_model_name_or_path": "a/target",
        "chat_template": "qwen",
        "max_length": 4096,
        "min_loss_tokens": 14,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, sort_keys=True))
