"""`dflash import`: peers' dumps become the cache that `dflash generate` makes of the same conversations."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cache.adopt.writers import (
    Captured,
    capture,
    write_deepspec,
    write_modelopt,
    write_specforge,
    write_speculators,
)
from transformers import AutoModelForCausalLM

from dflash_cache.cache.reader import CacheReader

LAYER_IDS = (0, 2, 4)
WRITERS: dict[str, tuple[Callable[..., None], list[str]]] = {
    "vllm": (write_speculators, ["--layer-ids", "1,3,5", "--numbering", "input"]),
    "specforge": (write_specforge, ["--layer-ids", "0,2,4"]),
    "modelopt": (write_modelopt, ["--layer-ids", "0,2,4", "--numbering", "output"]),
    "deepspec": (write_deepspec, []),
}


def capture_all(cache: Path, model_folder: Path, dtype: torch.dtype) -> list[Captured]:
    """The samples that `generate` made, forwarded one by one by transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype)
    rows = pq.read_table(cache / "samples" / "samples.parquet")
    pairs = zip(rows["input_ids"].to_pylist(), rows["loss_mask"].to_pylist(), strict=True)
    return [capture(model, ids, mask) for ids, mask in pairs]


@pytest.mark.parametrize("tool", WRITERS)
def test_a_dump_becomes_the_cache_that_generate_makes_and_trains_to_the_same_loss(
    dflash, project: Path, llama_folder: Path, tool: str
) -> None:
    dtype = "bfloat16" if tool == "deepspec" else "float32"
    # a token budget of 1 makes jobs of one sample: then the states are a plain forward's, to the bit
    made = dflash("generate", project, "--set", "generate.token_budget=1", "--set", f"target.dtype={dtype}")
    assert made.code == 0, made.err
    samples = capture_all(project.parent / "cache", llama_folder, getattr(torch, dtype))
    write, options = WRITERS[tool]
    write(project.parent / "dump", samples, LAYER_IDS)
    imported = project.parent / "imported"
    outcome = dflash("import", project.parent / "dump", imported, "--format", tool, "--config", project, *options)
    assert outcome.code == 0, outcome.err
    shown = " ".join(outcome.out.split())
    assert "Layers 0, 2, 4: the outputs of these decoder layers, counted from 0." in shown
    assert "complete: 60 samples" in shown
    with CacheReader(project.parent / "cache") as one, CacheReader(imported) as other:
        rows = np.arange(60)
        for left, right in zip(vars(one.read_batch(rows)).values(), vars(other.read_batch(rows)).values(), strict=True):
            assert torch.equal(left, right)
        assert one.index.checksum.tolist() == other.index.checksum.tolist()
        same = ("layer_ids", "dtype", "bucket_bounds", "data_fingerprint", "mask_token_candidates", "vocab_size")
        assert all(getattr(one.manifest, name) == getattr(other.manifest, name) for name in same)
    losses = []
    for cache in (project.parent / "cache", imported):
        run = project.parent / f"run-{cache.name}"
        settings = [f"cache_dir={cache}", f"run_dir={run}", "train.max_steps=2"]
        trained = dflash("train", project, *(part for setting in settings for part in ("--set", setting)))
        assert trained.code == 0, trained.err
        losses.append([json.loads(line)["loss"] for line in (run / "log.jsonl").read_text().splitlines()])
    assert losses[0] == losses[1]
    assert len(losses[0]) >= 2


def check(outcome, *parts: str) -> None:
    """Exit code 2 and one line on stderr that holds all parts."""
    assert outcome.code == 2, outcome
    assert outcome.err.startswith("Error: ")
    assert outcome.err.count("\n") == 1
    for part in parts:
        assert part in outcome.err, outcome.err


@pytest.fixture(scope="module")
def captured(llama_folder: Path) -> list[Captured]:
    """24 samples of 6 to 29 tokens, the second half of each supervised."""
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float32)
    lengths = [6 + 7 * i % 24 for i in range(24)]
    return [
        capture(model, [7 + (3 * i + j * j) % 90 for j in range(n)], [j >= n // 2 for j in range(n)])
        for i, n in enumerate(lengths)
    ]


@pytest.fixture
def modelopt(dflash, tmp_path: Path, llama_folder: Path, captured: list[Captured]) -> Callable[..., object]:
    """Imports `tmp_path/dump`, which is written unless it is there, into `tmp_path/cache`."""

    def run(*options: object, layers: str = "0,2,4"):
        if not (tmp_path / "dump").exists():
            write_modelopt(tmp_path / "dump", captured, LAYER_IDS)
        known = ["--format", "modelopt", "--target", llama_folder, "--layer-ids", layers, "--numbering", "output"]
        return dflash("import", tmp_path / "dump", tmp_path / "cache", *known, "--num-buckets", 3, *options)

    return run


def test_bad_samples_are_left_out_by_name_and_the_rest_can_be_trained(
    dflash, project: Path, modelopt, captured: list[Captured]
) -> None:
    dump, cache = project.parent / "dump", project.parent / "cache"
    write_modelopt(dump, captured, LAYER_IDS)
    for path, change in {
        "chat-3.pt": lambda record: record["aux_hidden_states"][4].fill_(torch.nan),
        "chat-8.pt": lambda record: record["aux_hidden_states"][2, 32:64].zero_(),
        "chat-11.pt": lambda record: record["input_ids"].__setitem__(1, 128),
        "chat-15.pt": lambda record: record.update(aux_hidden_states=record["aux_hidden_states"][:-2]),
        "chat-20.pt": lambda record: record.update(loss_mask=torch.ones(99)),
    }.items():
        record = torch.load(dump / path)
        change(record)
        torch.save(record, dump / path)
    whole = (dump / "chat-5.pt").read_bytes()
    (dump / "chat-5.pt").write_bytes(whole[: len(whole) // 2])
    check(modelopt(), "Too many samples of the dump cannot be used", "a damaged file", "at most 1.00% of 24")
    assert not (cache / "manifest.json").exists()
    check(modelopt("--strict"), "chat-5.pt cannot be used (a damaged file")
    assert not (cache / "manifest.json").exists()
    outcome = modelopt("--max-bad-share", 0.3)
    assert outcome.code == 0, outcome.err
    shown = " ".join(outcome.out.split())
    assert "Left out 1 (first: chat-15.pt, states of" in shown
    assert "complete: 18 samples" in shown
    rows = pq.read_table(cache / "left_out.parquet").to_pylist()
    assert {row["source"]: row["reason"] for row in rows} == {
        "chat-5.pt": "a damaged file",
        "chat-11.pt": "a token id outside the target's vocabulary",
        "chat-15.pt": "states of another length than the tokens",
        "chat-20.pt": "a loss mask of another length than the tokens",
        "chat-3.pt": "states that are not finite",
        "chat-8.pt": "states with rows of zeros",
    }
    details = {row["source"]: row["detail"] for row in rows}
    assert details["chat-3.pt"] == "the first at token 4, layer 0 of those dumped"
    assert details["chat-8.pt"] == "the first at token 2, layer 1 of those dumped"
    samples = pq.read_table(cache / "samples" / "samples.parquet")
    assert samples["source"].to_pylist() == [f"chat-{i}.pt" for i in range(24) if i not in (3, 5, 8, 11, 15, 20)]
    with CacheReader(cache) as reader:
        assert reader.index.sample.tolist() == samples["sample"].to_pylist()
        assert reader.manifest.num_samples == 18
        for row, source in enumerate(samples["source"].to_pylist()):
            batch, sample = reader.read_batch(np.array([row])), captured[int(source[5:-3])]
            assert batch.input_ids[0].tolist() == sample.input_ids.tolist()
            assert torch.equal(batch.hidden_STLH[0], torch.stack([sample.outputs[k] for k in LAYER_IDS], dim=1))
    before = read_files(cache)
    assert modelopt("--max-bad-share", 0.3).code == 0
    assert read_files(cache) == before
    trained = dflash("train", project, "--set", "train.max_steps=1", "--set", "train.validation_share=0.1")
    assert trained.code == 0, trained.err


class Payload:
    """Pickles as a call that makes a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_pickled_code_is_refused_and_never_run(modelopt, captured: list[Captured], tmp_path: Path) -> None:
    write_modelopt(tmp_path / "dump", captured, LAYER_IDS, conversation_id=Payload(tmp_path / "ran"))
    check(modelopt(), "pickled objects other than tensors and plain values (never run)", "first chat-0.pt")
    assert not (tmp_path / "ran").exists()


def test_a_dump_without_masks_of_the_answers_is_refused(modelopt, captured: list[Captured], tmp_path: Path) -> None:
    write_modelopt(tmp_path / "dump", captured, LAYER_IDS, loss_mask=None)
    check(modelopt(), "chat-0.pt holds no loss_mask", "dump again with one", "--answer-only-loss")
    full = [replace(sample, loss_mask=torch.ones_like(sample.loss_mask)) for sample in captured]
    shutil.rmtree(tmp_path / "dump")
    write_modelopt(tmp_path / "dump", full, LAYER_IDS)
    check(modelopt(), "The loss mask of every sample covers all of its tokens", "--full-masks")
    assert modelopt("--full-masks").code == 0


def test_layers_that_nobody_names_or_that_cannot_be_right_are_refused(
    dflash, modelopt, captured: list[Captured], tmp_path: Path, llama_folder: Path
) -> None:
    check(modelopt(layers="0,2"), "another number of layers or hidden size", "96 numbers a token instead of 2 × 32")
    check(modelopt(layers="0,2,5"), "stores layer 5, the last one, after the final norm")
    check(modelopt(layers="0,2,6"), "must ascend and lie between 0 and 5")
    check(modelopt("--numbering", "input"), "The layers [-1, 1, 3]")
    write_speculators(tmp_path / "vllm", captured, LAYER_IDS)
    command = ["import", tmp_path / "vllm", tmp_path / "other", "--format", "vllm", "--target", llama_folder]
    check(dflash(*command), "does not say which layers it holds: give --layer-ids")
    check(dflash(*command, "--layer-ids", "1,3,5"), "--layer-ids need --numbering here")
    check(dflash(*command, "--layer-ids", "one", "--numbering", "input"), "is no list of whole numbers")
    write_deepspec(tmp_path / "deepspec", captured, LAYER_IDS)
    command = ["import", tmp_path / "deepspec", tmp_path / "other", "--format", "deepspec", "--target", llama_folder]
    check(dflash(*command, "--layer-ids", "1,3,5"), "The dump says that it holds layers [0, 2, 4], not [1, 3, 5]")
    check(dflash(*command[:-2]), "No target is named: give --target")
    check(dflash("import", tmp_path / "deepspec", tmp_path / "deepspec", *command[3:]), "in the dump itself")
    check(dflash("import", tmp_path / "nowhere", *command[2:]), "There is no folder")
    check(dflash(*command[:2], "s3://key:secret@bucket/cache", *command[3:]), "fills a folder, and s3://bucket/cache")


def test_the_last_layer_that_speculators_adds_is_cached_only_if_it_is_asked_for(
    dflash, captured: list[Captured], tmp_path: Path, llama_folder: Path
) -> None:
    write_speculators(tmp_path / "dump", captured, LAYER_IDS)
    command = ["import", tmp_path / "dump", tmp_path / "cache", "--format", "vllm", "--target", llama_folder]
    assert dflash(*command, "--layer-ids", "1,3,5,6", "--numbering", "input").code == 0
    with CacheReader(tmp_path / "cache") as reader:
        assert reader.manifest.layer_ids == (0, 2, 4, 5)
        batch = reader.read_batch(np.array([3]))
        expected = torch.stack([captured[3].outputs[k] for k in (0, 2, 4, 5)], dim=1)
        assert torch.equal(batch.hidden_STLH[0], expected)


def test_rows_without_states_are_counted_and_states_without_rows_or_of_other_tokens_are_refused(
    dflash, captured: list[Captured], tmp_path: Path, llama_folder: Path
) -> None:
    dump = tmp_path / "dump"
    write_speculators(dump, captured, LAYER_IDS)
    states = dump / "hidden_states"
    (states / "hs_17.safetensors").unlink()
    known = ["--format", "vllm", "--target", llama_folder, "--layer-ids", "1,3,5", "--numbering", "input"]
    outcome = dflash("import", dump, tmp_path / "cache", *known)
    assert outcome.code == 0, outcome.err
    assert "Left out 1 (first: hs_17.safetensors): rows without states." in " ".join(outcome.out.split())
    (states / "hs_2.safetensors").rename(states / "hs_17.safetensors")
    check(
        dflash("import", dump, tmp_path / "other", *known), "other tokens than the dataset's, first hs_17.safetensors"
    )
    (states / "hs_17.safetensors").rename(states / "hs_24.safetensors")
    check(dflash("import", dump, tmp_path / "other", *known), "ends with row 23", "--dataset")
    moved = dflash("import", states, tmp_path / "other", *known, "--dataset", tmp_path)
    check(moved, "There is no Arrow dataset in", "prepare_data.py")
    for name, columns, expected in (
        ("short", {"input_ids": [[1]]}, "lacks loss_mask"),
        ("gaps", {"input_ids": [[1, None]] * 99, "loss_mask": [[0, 1]] * 99}, "with gaps where lists of numbers"),
    ):
        table = pa.table(columns)
        (tmp_path / name).mkdir()
        with pa.ipc.new_stream(str(tmp_path / name / "data-00000-of-00001.arrow"), table.schema) as stream:
            stream.write_table(table)
        check(dflash("import", states, tmp_path / "other", *known, "--dataset", tmp_path / name), expected)


def test_a_records_padding_is_cut_off_and_eagle_records_are_read_too(
    dflash, captured: list[Captured], tmp_path: Path, llama_folder: Path
) -> None:
    write_specforge(tmp_path / "dump", captured, LAYER_IDS, eagle=True)
    command = ["import", tmp_path / "dump", tmp_path / "cache", "--format", "specforge", "--target", llama_folder]
    outcome = dflash(*command, "--layer-ids", "0,2,4", "--max-length", 25)
    assert outcome.code == 0, outcome.err
    short = [sample for sample in captured if len(sample.input_ids) <= 25]
    assert f"Left out {24 - len(short)} (first: rows_" in " ".join(outcome.out.split())
    with CacheReader(tmp_path / "cache") as reader:
        assert reader.index.length.tolist() == [len(sample.input_ids) for sample in short]
        for row, sample in enumerate(short):
            states = reader.read_batch(np.array([row])).hidden_STLH[0]
            assert torch.equal(states, torch.stack([sample.outputs[k] for k in LAYER_IDS], dim=1))
    shutil.copy(tmp_path / "dump" / "rows_0-20" / "data_0.ckpt", tmp_path / "dump" / "rows_0-20" / "data_4.ckpt")
    check(dflash(*command, "--layer-ids", "0,2,4"), "holds the same sample twice")


def test_an_unfinished_or_foreign_deepspec_cache_is_refused(
    dflash, captured: list[Captured], tmp_path: Path, llama_folder: Path
) -> None:
    dump = tmp_path / "dump"
    write_deepspec(dump, captured, LAYER_IDS)
    command = ["import", dump, tmp_path / "cache", "--format", "deepspec", "--target", llama_folder]
    text = (dump / "manifest.json").read_text()
    (dump / "manifest.json").write_text(text.replace('"version": 2', '"version": 3'))
    check(dflash(*command), "version 2 (version is 3)")
    (dump / "manifest.json").write_text(text.replace("[\n    0,\n", "[\n    -1,\n"))
    check(dflash(*command), "holds the embedding's output")
    for found, wrong, said in (
        ('"hidden_size": 32', '"hidden_size": null', "wrong entries (hidden_size: Input should be a valid integer)"),
        ("[\n    0,\n", '[\n    "0",\n', "wrong entries (target_layer_ids.0: Input should be a valid integer)"),
        ('"shard_id": 0', '"shard": 0', "wrong entries (shards.0.shard_id: Field required)"),
        (text, "null", "does not hold a JSON object"),
    ):
        (dump / "manifest.json").write_text(text.replace(found, wrong))
        check(dflash(*command), said)
    (dump / "manifest.json").unlink()
    check(dflash(*command), "There is no manifest.json in", "writes it last")
    (dump / "manifest.json").write_text(text)
    index = (dump / "samples.idx").read_bytes()
    (dump / "samples.idx").write_bytes(index[:-56])
    check(dflash(*command), "does not list the 24 samples of the manifest in order")
    (dump / "samples.idx").write_bytes(index[:16] + b"\xff" * 8 + index[24:])
    check(dflash(*command), "a shard that is missing or ends too early, first samples.idx:0, shard 0")
    (dump / "samples.idx").write_bytes(index)
    shard = dump / "shard-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2000])
    check(dflash(*command), "a shard that is missing or ends too early, first samples.idx:17, shard 1")


def test_a_damaged_import_is_repaired_by_the_same_import_and_verify_says_so(dflash, modelopt, tmp_path: Path) -> None:
    assert modelopt().code == 0
    assert "imported" not in dflash("verify", tmp_path / "cache", "--full").out
    whole = read_files(tmp_path / "cache")
    (tmp_path / "cache" / "bucket-1" / "shard-000000.safetensors").write_bytes(b"")
    shown = dflash("verify", tmp_path / "cache", "--repair").out
    assert "the cache was imported: where `dflash generate` is named, the same `dflash import` does it." in shown
    assert modelopt().code == 0
    assert read_files(tmp_path / "cache") == whole


def test_a_cache_of_another_origin_is_refused_with_the_difference(
    dflash, project: Path, modelopt, captured: list[Captured], tmp_path: Path
) -> None:
    assert modelopt().code == 0
    changed = [replace(sample, outputs=[state * 2 for state in sample.outputs]) for sample in captured]
    shutil.rmtree(tmp_path / "dump")
    write_modelopt(tmp_path / "dump", changed, LAYER_IDS)
    check(modelopt(), "was made from something else", "template_fingerprint: was of the dump with states")
    check(dflash("generate", project), "was made with another configuration", "mask_rule: was dumped by modelopt")
    shutil.rmtree(tmp_path / "cache")
    assert dflash("generate", project).code == 0
    check(modelopt(), "was made from something else", "is dumped by modelopt", "num_samples: was 60, is 24")


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


KILLED = """
import os, random, sys
import dflash_cache.cache.adopt.copy as copy
from dflash_cli.__main__ import main

whole, parts = sys.argv[2:4]
sys.argv = ["dflash", "import", sys.argv[1], whole, *sys.argv[4:]]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
sys.argv[3] = parts
random.seed(5)
for attempt in range(100):
    kill_at, count = random.randint(1, 20 + attempt), 0
    child = os.fork()
    if child == 0:
        def counted(call):
            def run(*args):
                global count
                count += 1
                if count == kill_at:
                    os._exit(9)
                return call(*args)
            return run
        os.fsync, copy.load_states = counted(os.fsync), counted(copy.load_states)
        main()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code != 9:
        print("killed", attempt, "times, then", code)
        break
"""


def test_an_import_killed_at_any_instant_ends_with_the_same_files_as_one_that_was_not(
    tmp_path: Path, llama_folder: Path, captured: list[Captured]
) -> None:
    dump, whole, parts = tmp_path / "dump", tmp_path / "whole", tmp_path / "parts"
    write_modelopt(dump, captured, LAYER_IDS)
    record = torch.load(dump / "chat-9.pt")
    record["aux_hidden_states"][1] = 0
    torch.save(record, dump / "chat-9.pt")
    (dump / "chat-14.pt").write_bytes(b"nothing")
    options = ["--format", "modelopt", "--target", llama_folder, "--layer-ids", "0,2,4", "--numbering", "output"]
    options += ["--num-buckets", 3, "--shard-bytes", 12_000, "--max-bad-share", 0.1]
    command = [sys.executable, "-c", KILLED, dump, whole, parts, *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()[-1].split()
    assert (words[0], words[2:]) == ("killed", ["times,", "then", "0"]), done.stdout
    assert int(words[1]) >= 10
    one, other = read_files(whole), read_files(parts)
    assert sum("shard-" in name for name in one) > 6
    for files in (one, other):
        for name in ("config.yaml", "manifest.json"):  # they name their own folder, and their seals differ for it
            text = files[name].replace(str(whole).encode(), str(parts).encode())
            files[name] = re.sub(rb"xxh3:[0-9a-f]{16}", b"", text)
    assert one == other
