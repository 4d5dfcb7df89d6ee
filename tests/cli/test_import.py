"""`dflash import`: peers' dumps become the cache that `dflash generate` makes of the same conversations."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
