"""A cache of a tiny target, made once, and a run's configuration on it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from train.rank_runs import NUM_WITHOUT_ANCHORS

from dflash_cache.config.loading import validate_config
from dflash_cache.config.settings import Config
from dflash_cache.target.generate import generate
from dflash_cache.target.observer import Observer

MAX_LENGTH = 40

Configure = Callable[..., Config]


def conversation(question: int, answer: int, i: int) -> str:
    """A question and an answer of so many words."""
    texts = [" ".join(f"w{(7 * i + step * j) % 90}" for j in range(n)) for n, step in ((question, 5), (answer, 3))]
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
    return json.dumps({"messages": messages})


@pytest.fixture(scope="session")
def base_config(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> Config:
    """Forty samples of 13 to 37 tokens, and some that are cut off after the answer's first token: without an anchor."""
    folder = tmp_path_factory.mktemp("train")
    lines = [conversation(2, 3 + (11 * i) % 25, i) for i in range(40)]
    lines += [conversation(MAX_LENGTH - 6, 5, i) for i in range(NUM_WITHOUT_ANCHORS)]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    config = validate_config(
        {
            "cache_dir": str(folder / "cache"),
            "run_dir": str(folder / "run"),
            "target": {"model": str(llama_folder), "dtype": "float32", "device": "cpu", "layer_ids": [0, 2, 4]},
            "data": {
                "paths": [str(folder / "data.jsonl")],
                "max_length": MAX_LENGTH,
                "overlong": "truncate",
                "min_answer_tokens": 1,
                "bucket_bounds": [20, 30, MAX_LENGTH],
            },
            "drafter": {"num_layers": 1, "block_size": 4, "init": "target-layers"},
            "train": {
                "epochs": 2,
                "token_budget": 90,
                "accumulation": 4,
                "anchors_per_sample": 6,
                "validation_share": 0.1,
                "learning_rate": 3e-3,
                "dtype": "float32",
                "device": "cpu",
                "validate_every": 3,
                "checkpoint_every": 2,
            },
        },
        "test",
    )
    generate(config, Observer())
    return config


@pytest.fixture
def configure(base_config: Config, tmp_path: Path) -> Configure:
    """The configuration of a run in a new folder `name`, with other training settings."""

    def change(name: str, **settings: object) -> Config:
        tree = base_config.model_dump(mode="json")
        tree["run_dir"] = str(tmp_path / name)
        tree["train"] |= settings
        return validate_config(tree, "test")

    return change
