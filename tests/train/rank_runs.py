"""Training runs in processes of their own, as torchrun starts them: several ranks, killed or asked to stop at will.

The processes come from one server that has imported torch once, so that a run of two ranks takes about a second.
"""

import json
import multiprocessing
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash_cache.config.settings import Config
from dflash_cache.errors import DFlashError
from dflash_cache.train.checkpoint import latest_path, load_checkpoint
from dflash_cache.train.loop import train
from dflash_cache.train.metrics import JsonLines, Record
from dflash_cache.train.ranks import join_ranks

COMPLETE, STOPPED, REFUSED, KILLED = 0, 3, 2, -signal.SIGKILL
NUM_WITHOUT_ANCHORS = 6  # samples of the cache that are cut off after the answer's first token
TIMED = {"seconds", "wait", "wait_share", "seconds_left", "memory_bytes"} | {
    f"{unit}_per_second" for unit in ("tokens", "samples", "blocks")
}  # what no two runs have alike

server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload([
    "dflash_cli.__main__", "dflash_cache.train.loop", "torch._dynamo", "pyarrow.dataset", "pandas",
    "transformers.activations", "transformers.utils.type_validators", "transformers.models.llama",
])  # fmt: skip


@dataclass(frozen=True)
class Fate:
    """What happens to which rank after which step, before the step's checkpoint."""

    rank: int = -1
    step: int = -1
    number: signal.Signals = signal.SIGKILL

    def __call__(self, record: Record) -> None:
        if record["kind"] == "train" and record["step"] == self.step:
            os.kill(os.getpid(), self.number)


def free_port() -> int:
    """One that nobody listened at just now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def run_ranks(configs: list[Config], fate: Fate = Fate()) -> list[tuple[int, str]]:
    """Train with one process a configuration; each one's exit code, and its error's text if it was refused."""
    port = free_port()
    folder = Path(configs[0].run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    errors = [folder / f"error-{rank}.txt" for rank in range(len(configs))]
    places = [(rank, len(configs), port) for rank in range(len(configs))]
    arguments = zip(configs, places, errors, [fate] * len(configs), strict=True)
    processes = [server.Process(target=_train_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    texts = [path.read_text() if path.exists() else "" for path in errors]
    return [(process.exitcode, text) for process, text in zip(processes, texts, strict=True)]


def final_state(config: Config) -> tuple[int, dict[str, torch.Tensor]]:
    """The last checkpoint's step, and all its tensors, the optimizers' too."""
    path = latest_path(Path(config.run_dir))
    assert path is not None
    checkpoint = load_checkpoint(path)
    tensors = dict(checkpoint.drafter)
    for number, optimizer in enumerate(checkpoint.optimizers):
        for parameter, state in optimizer["state"].items():
            tensors |= {f"{number}.{parameter}.{name}": value for name, value in state.items()}
    return checkpoint.step, tensors


def read_log(config: Config) -> list[dict[str, Any]]:
    """All records, without what depends on the machine's speed."""
    lines = (Path(config.run_dir) / "log.jsonl").read_text().splitlines()
    records = [{name: value for name, value in json.loads(line).items() if name not in TIMED} for line in lines]
    for record in records:
        record.get("batch", {}).pop("ready", None)
    return records


def _train_rank(config: Config, place: tuple[int, int, int], error_path: Path, fate: Fate) -> None:
    rank, world_size, port = place
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    error_path.unlink(missing_ok=True)
    try:
        with join_ranks(config.train.device) as ranks, JsonLines(Path(config.run_dir) / "log.jsonl") as log:
            sinks = [log] if ranks.is_first else []
            complete = train(config, [*sinks, fate] if rank == fate.rank else sinks, ranks)
    except DFlashError as error:
        error_path.write_text(str(error))
        os._exit(REFUSED)
    os._exit(COMPLETE if complete else STOPPED)
