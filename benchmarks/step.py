"""One training step of the drafter (forward and backward), ours against one written plainly, side by side.

The plain step does what peers do: a dense mask over [context | all blocks], logits of every slot kept until the
backward pass. Both see the same micro-batches, alternately in one process, so that the ratio survives a machine whose
speed drifts, in the dtype that training would choose (`--dtype auto`). Sizes (`step_sizes.py`) are those of drafters of
real targets, weights are random; the default is SmolLM2's, 150 to 1,000 tokens, 40 anchors a sample.

    python benchmarks/step.py [--size smollm2 --dtype auto --rounds 5 --peak --json]
    python benchmarks/step.py --size qwen3-8b --device cuda --peak      one GPU: 4,096 tokens, 512 anchors, block 16

*over_plain*: blocks a second over the plain step's. *roofline*: the share of our step's time that its counted
operations would take at the rate of this machine's matrix products, as measured for the head's shape; attention counts
as if nothing were masked. *limit_over_plain*: what *over_plain* would be if our step took that time and no more. With
`--peak`, the memory that a step adds, for two vocabularies, each way in a new process.
Nothing here was seen on a GPU yet.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command line does, for both ways

import torch
from rich.console import Console
from rich.table import Table
from step_sizes import SIZES, Size
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from dflash_cache.config.dtypes import fastest_dtype
from dflash_cache.config.settings import ObjectiveSettings
from dflash_cache.drafter.anchors import Blocks, draw_anchors, make_blocks, pad_anchors
from dflash_cache.drafter.frozen import FrozenTarget
from dflash_cache.drafter.head import Head
from dflash_cache.drafter.loss import block_loss
from dflash_cache.drafter.model import Drafter, DraftLayer
from dflash_cache.drafter.objective import weigh_slots
from dflash_cache.drafter.rope import rotary_table, rotate
from dflash_cache.drafter.shape import DrafterShape


@dataclass(frozen=True)
class Input:
    """One padded micro-batch: captured states (S, T, L, H) and blocks."""

    states: torch.Tensor
    blocks: Blocks


def our_step(drafter: Drafter, frozen: FrozenTarget, states: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The step as training runs it."""
    slots = frozen.embed_blocks(blocks.tokens_SA, drafter.shape)
    out = drafter(slots, drafter.read_context(states, anchors_SA=blocks.anchors_SA), blocks.anchors_SA)
    loss = block_loss(out, blocks, frozen.head, partial(weigh_slots, settings=ObjectiveSettings()))
    return loss.loss_sum / loss.weight_sum


def plain_step(drafter: Drafter, frozen: FrozenTarget, states: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The same loss with a dense mask and full logits."""
    S, T = states.shape[:2]
    A, B = blocks.anchors_SA.shape[1], drafter.shape.block_size
    context = drafter.hidden_norm(drafter.fc(states.flatten(-2)))
    slots = frozen.embed_blocks(blocks.tokens_SA, drafter.shape).flatten(1, 2)
    before = torch.arange(T, device=states.device) < blocks.anchors_SA[..., None]
    own = (
        torch.eye(A, dtype=torch.bool, device=states.device)
        .repeat_interleave(B, 0)
        .repeat_interleave(B, 1)
        .expand(S, -1, -1)
    )
    mask = torch.cat([before.repeat_interleave(B, 1), own], dim=2)[:, None]
    slot_positions = (blocks.anchors_SA[..., None] + torch.arange(B, device=states.device)).flatten(1)
    positions = torch.cat([torch.arange(T, device=states.device).expand(S, -1), slot_positions], dim=1)
    for layer in drafter.layers:
        slots = _plain_layer(layer, slots, context, mask, positions, drafter.shape)
    # Flat: with more axes a bfloat16 product on a CPU copies the head once a row, 300 times slower.
    logits = (drafter.norm(slots).view(S, A, B, -1)[:, :, 1:].flatten(0, 2) @ frozen.head_VH.T).float()
    ce = F.cross_entropy(logits, blocks.labels_SAK.flatten(), reduction="none").view_as(blocks.mask_SAK)
    weights = weigh_slots(ce.detach().flatten(0, 1), blocks.mask_SAK.flatten(0, 1), ObjectiveSettings())
    return (weights * ce.flatten(0, 1)).sum() / weights.sum()


def _plain_layer(
    layer: DraftLayer,
    slots: torch.Tensor,
    context: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    shape: DrafterShape,
) -> torch.Tensor:
    attention, D = layer.self_attn, shape.head_dim
    normed = layer.input_layernorm(slots)
    both = torch.cat([context, normed], dim=1)
    Q = slots.shape[1]
    table = rotary_table(positions, D, shape.rope_theta)
    query = rotate(attention.q_norm(attention.q_proj(normed).unflatten(-1, (-1, D))), tuple(t[:, -Q:] for t in table))
    key = rotate(attention.k_norm(attention.k_proj(both).unflatten(-1, (-1, D))), table)
    value = attention.v_proj(both).unflatten(-1, (-1, D))
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    slots = slots + attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return slots + layer.mlp(layer.post_attention_layernorm(slots))


Step = Callable[[Drafter, FrozenTarget, torch.Tensor, Blocks], torch.Tensor]
WAYS: dict[str, Step] = {"ours": our_step, "plain": plain_step}


def make_inputs(size: Size, dtype: torch.dtype, device: torch.device) -> list[Input]:
    """Random micro-batches, the second half of each sample supervised."""
    inputs, shape = [], size.shape
    for lengths in size.micro_batches:
        S, T = len(lengths), max(lengths)
        length_S = torch.tensor(lengths)[:, None]
        positions = torch.arange(T).expand(S, -1)
        mask = (positions >= length_S // 2) & (positions < length_S)
        ids = torch.randint(0, shape.vocab_size, (S, T))
        anchors = [draw_anchors(row.numpy(), size.anchors, (0, 0, s)) for s, row in enumerate(mask)]
        padded = pad_anchors(anchors).to(device)
        states = torch.randn(S, T, len(shape.target_layer_ids), shape.hidden_size).to(device, dtype)
        inputs.append(Input(states, make_blocks(ids.to(device), mask.to(device), padded, shape.block_size)))
    return inputs


def make_models(shape: DrafterShape, dtype: torch.dtype, device: torch.device) -> tuple[Drafter, FrozenTarget]:
    """A drafter with float32 weights and a frozen embedding and head in `dtype`, all random."""
    drafter = Drafter(shape)
    drafter.initialize(torch.Generator().manual_seed(0))
    table = (torch.randn(shape.vocab_size, shape.hidden_size) * 0.1).to(device, dtype)
    return drafter.to(device), FrozenTarget(table, Head(table), 1.0)


def run_step(way: str, drafter: Drafter, frozen: FrozenTarget, micro_batch: Input) -> float:
    """Seconds of one forward and backward; the gradients stay on the drafter."""
    device, dtype = micro_batch.states.device, micro_batch.states.dtype
    drafter.zero_grad(set_to_none=True)
    started = time.perf_counter()
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss = WAYS[way](drafter, frozen, micro_batch.states, micro_batch.blocks)
    loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def product_rate(shape: DrafterShape, dtype: torch.dtype, device: torch.device) -> float:
    """Operations a second of the product with the head, 1,024 rows: the best of many."""
    rows = torch.randn(1024, shape.hidden_size).to(device, dtype)
    head = torch.randn(shape.vocab_size, shape.hidden_size).to(device, dtype)
    out = torch.empty(1024, shape.vocab_size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        torch.mm(rows, head.T, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2.0 * rows.numel() * shape.vocab_size / best


def count_operations(drafter: Drafter, frozen: FrozenTarget, micro_batch: Input) -> int:
    """Multiplications and additions of our step's matrix products, as torch counts them while it runs.

    It does not see into compiled kernels, so on CUDA attention is counted as it is done densely: as many on a CPU.
    """
    usual, drafter.attention = drafter.attention, "dense" if micro_batch.states.is_cuda else drafter.attention
    with FlopCounterMode(display=False) as counter:
        run_step("ours", drafter, frozen, micro_batch)
    drafter.attention = usual
    return counter.get_total_flops()


def compare(size: Size, dtype: torch.dtype, device: torch.device, rounds: int) -> dict[str, float]:
    """Both ways' rates and the named figures; fails if their gradients differ."""
    drafter, frozen = make_models(size.shape, dtype, device)
    inputs = make_inputs(size, dtype, device)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):  # the first round warms up
        for way in WAYS:
            seconds[way].append(sum(run_step(way, drafter, frozen, micro_batch) for micro_batch in inputs))
    gradients = {}
    for way in WAYS:
        run_step(way, drafter, frozen, inputs[0])
        gradients[way] = torch.cat([parameter.grad.flatten() for parameter in drafter.parameters()])  # type: ignore[union-attr]
    difference = (gradients["ours"] - gradients["plain"]).norm() / gradients["plain"].norm()
    assert difference < (1e-4 if dtype == torch.float32 else 0.05), f"the gradients differ by {difference:.2g}"
    num_blocks = sum(int(micro_batch.blocks.mask_SAK[..., 0].sum()) for micro_batch in inputs)
    operations = sum(count_operations(drafter, frozen, micro_batch) for micro_batch in inputs)
    typical = {way: statistics.median(times[1:]) for way, times in seconds.items()}
    ratio = statistics.median(plain / ours for ours, plain in zip(*(seconds[way][1:] for way in WAYS), strict=True))
    fastest = operations / product_rate(size.shape, dtype, device)
    return {
        "over_plain": ratio,
        "limit_over_plain": typical["plain"] / fastest,
        "roofline": fastest / typical["ours"],
        "blocks_per_second": num_blocks / typical["ours"],
        "plain_blocks_per_second": num_blocks / typical["plain"],
        "tokens_per_second": size.num_tokens / typical["ours"],
        "tera_operations": operations / 1e12,
    }


def measure_peak(
    way: str, size: Size, dtype: torch.dtype, device: torch.device, queue: "multiprocessing.Queue[int]"
) -> None:
    """Bytes by which a step of the first micro-batch raises the process's peak over what models and inputs take."""
    drafter, frozen = make_models(size.shape, dtype, device)
    micro_batch = make_inputs(size, dtype, device)[0]
    before = forget_peak(device)
    run_step(way, drafter, frozen, micro_batch)
    queue.put(peak_bytes(device) - before)


def forget_peak(device: torch.device) -> int:
    """From now on the peak is that of what follows; returns the bytes held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory held since the peak was last forgotten: the device's, or this process's (Linux)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def peaks(size: Size, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """GiB that a step of the first micro-batch adds, by way and vocabulary."""
    context = multiprocessing.get_context("spawn")
    found = {}
    for way in WAYS:
        for vocab_size in (49_152, 152_064):
            shape = replace(size.shape, vocab_size=vocab_size, mask_token_id=min(size.shape.mask_token_id, 16))
            queue = context.Queue()
            process = context.Process(target=measure_peak, args=(way, replace(size, shape=shape), dtype, device, queue))
            process.start()
            process.join()
            if process.exitcode:  # out of memory, mostly; its own words stand above
                raise SystemExit(f"A step ({way}, {vocab_size:,} entries) failed: its peak is not known.")
            found[f"peak_gib_{way}_{vocab_size}"] = queue.get() / 2**30
    return found


def main() -> None:
    """Print a table, and with --json one object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), default="smollm2")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    name = fastest_dtype() if arguments.dtype == "auto" else arguments.dtype
    dtype = getattr(torch, name)
    size, device = SIZES[arguments.size], torch.device(arguments.device)
    figures = compare(size, dtype, device, arguments.rounds)
    if arguments.peak:
        figures |= peaks(size, dtype, device)
    table = Table("figure", f"{arguments.size}, {name}, {device}", box=None)
    for key, value in figures.items():
        table.add_row(key, f"{value:,.2f}")
    Console().print(table)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
