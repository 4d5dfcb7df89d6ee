"""The configuration of a small cache, and one thread for all that computes it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from target.small_cache import NUM_SAMPLES, conversation

from dflash_cache.config.settings import Config


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Here and in all that a test starts: on some processors a product's last bits depend on how many share it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(before)


@pytest.fixture
def configure(tmp_path: Path, llama_folder: Path) -> Callable[..., Config]:
    """Configurations of a cache of 60 samples in many small jobs and shards."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(NUM_SAMPLES)))

    def make(cache_dir: Path | str = "cache", **settings: Any) -> Config:
        return Config.model_validate(
            {
                "cache_dir": str(tmp_path / cache_dir),
                "run_dir": str(tmp_path / "run"),
                "target": {"model": str(llama_folder), "dtype": "float32", "device": "cpu", "layer_ids": [0, 2, 4]},
                "data": {"paths": [str(data)], "max_length": 64, "num_buckets": 3},
                "generate": {"token_budget": 96, "shard_bytes": 16_000, **settings},
            }
        )

    return make
