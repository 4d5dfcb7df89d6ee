"""Answers by several workers are those of one, and a run that loses a worker goes on with what is missing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from target.small_cache import ENVIRONMENT, checksums

from dflash_cache.config.loading import dump_config
from dflash_cache.config.settings import Config
from dflash_cache.target.generate import generate
from dflash_cache.target.observer import Observer

NUM_PROMPTS = 16
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dflash_cli", "generate"]


@pytest.fixture
def configure_answers(configure: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """The small cache, of prompts alone, whose answers are sampled in batches of three."""
    prompts = [{"messages": [{"role": "user", "content": f"w{i} w{i % 7}"}]} for i in range(NUM_PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))

    def make(cache_dir: str, **respond: Any) -> Config:
        tree = configure(cache_dir).model_dump()
        tree["data"]["max_length"] = 128
        tree["data"]["paths"] = [str(tmp_path / "prompts.jsonl")]
        settings = {"enabled": True, "max_new_tokens": 8, "batch_size": 3, "temperature": 1.0}
        return Config.model_validate(tree | {"respond": settings | respond})

    return make


def command(config: Config, way: list[str], *more: str) -> list[str]:
    path = Path(f"{config.cache_dir}.yaml")
    path.write_text(dump_config(config))
    return [sys.executable, *way, str(path), *more]


def answers(config: Config) -> dict[str, bytes]:
    """The answers' files but the prompts', which one worker does not need."""
    paths = Path(config.cache_dir, "responses").glob("batch-*")
    return {path.name: path.read_bytes() for path in paths}


def test_workers_of_our_own_and_of_torchrun_answer_as_one_does(
    configure_answers: Callable[..., Config], tmp_path: Path
) -> None:
    alone = configure_answers("alone")
    generate(alone, Observer())
    crew, launched = configure_answers("crew"), configure_answers("torchrun")
    commands = [
        command(crew, ["-m", "dflash_cli", "generate"], "--devices", "cpu:2"),
        command(launched, LAUNCH),
    ]
    for words in commands:
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        assert " ".join(done.stdout.split()).count(f"is complete: {NUM_PROMPTS} samples.") == 1
    assert len(answers(alone)) == 6
    for config in (crew, launched):
        assert answers(config) == answers(alone)
        assert checksums(config.cache_dir) == checksums(alone.cache_dir)
        prompts = pq.read_table(Path(config.cache_dir, "responses", "prompts.parquet"))
        assert prompts.num_rows == NUM_PROMPTS


def test_a_killed_worker_ends_the_answering_and_the_next_run_makes_the_missing_batches(
    configure_answers: Callable[..., Config],
) -> None:
    config, alone = (configure_answers(name, max_new_tokens=50, batch_size=1) for name in ("killed", "alone"))
    words = command(config, ["-m", "dflash_cli", "generate"], "--devices", "cpu:2")
    run = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    until = time.monotonic() + 120
    while not answers(config):
        assert time.monotonic() < until
        assert run.poll() is None
        time.sleep(0.01)
    workers = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()][1:]
    os.kill(workers[1], signal.SIGKILL)  # the first child is multiprocessing's resource tracker
    _, err = run.communicate(timeout=60)
    assert run.returncode == 2
    assert err.strip() == "Error: Worker 1 (cpu) was killed by signal 9: run the same command again."
    made = answers(config)
    assert len(made) < NUM_PROMPTS

    refused = subprocess.run(
        [*words, "--set", "respond.seed=1"], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert refused.returncode == 2
    assert "belong to something else (seed: was 0, is 1): undo the change" in refused.stderr
    assert answers(config) == made

    generate(alone, Observer())
    subprocess.run(words, check=True, env=ENVIRONMENT)
    assert answers(config) == answers(alone)
    assert checksums(config.cache_dir) == checksums(alone.cache_dir)
