"""A small project: a tiny target, conversations, a configuration; and the command line, run in this process."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from dflash_cli.__main__ import main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def dflash(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `dflash ARGS…` and gives exit code and output."""

    def run(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["dflash", *map(str, args)])
        code = 0
        capsys.readouterr()  # what came before is not the command's
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def conversation(i: int, words: int) -> dict[str, object]:
    """A question, and an answer of `words` words."""
    answer = " ".join(f"w{(7 * i + 3 * j) % 90}" for j in range(words))
    return {"messages": [{"role": "user", "content": f"w{i % 90} w1"}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def project(tmp_path: Path, llama_folder: Path) -> Path:
    """The configuration's path; data.jsonl, cache and run lie beside it."""
    lines = [json.dumps(conversation(i, 4 + i % 30)) for i in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    prompts = [json.dumps({"prompt": f"w{i} w{i + 1} w5"}) for i in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts) + "\n")
    config = {
        "cache_dir": str(tmp_path / "cache"),
        "run_dir": str(tmp_path / "run"),
        "target": {"model": str(llama_folder), "dtype": "float32", "device": "cpu", "layer_ids": [0, 2, 4]},
        "data": {"paths": [str(tmp_path / "data.jsonl")], "max_length": 64, "num_buckets": 3},
        "generate": {"token_budget": 256, "shard_bytes": 20_000},
        "drafter": {"num_layers": 1, "block_size": 4, "init": "target-layers"},
        "train": {
            "epochs": 2,
            "token_budget": 128,
            "accumulation": 3,
            "anchors_per_sample": 6,
            "validation_share": 0.1,
            "dtype": "float32",
            "device": "cpu",
            "log_every": 2,
            "validate_every": 5,
            "checkpoint_every": 4,
        },
        "eval": {"prompts": [str(tmp_path / "prompts.jsonl")], "max_new_tokens": 8, "device": "cpu"},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path
