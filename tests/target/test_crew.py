from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore

from dflash_cache.config.settings import Config
from dflash_cache.errors import ConfigError
from dflash_cache.target.crew import join_launcher, worker_devices
from dflash_cache.target.dealer import Dealer


def make_config(devices: str | None, **target: Any) -> Config:
    return Config.model_validate(
        {
            "cache_dir": "cache",
            "run_dir": "run",
            "target": {"model": "model", **target},
            "data": {"paths": ["data.jsonl"]},
            "generate": {"devices": devices},
        }
    )


def test_devices_are_named_one_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert worker_devices(make_config(None, device="cuda:1")) == ["cuda:1"]
    assert worker_devices(make_config("all")) == ["cuda:0", "cuda:1", "cuda:2"]
    assert worker_devices(make_config("2,0")) == ["cuda:2", "cuda:0"]
    assert worker_devices(make_config("cpu:2")) == ["cpu", "cpu"]
    assert worker_devices(make_config("cpu")) == ["cpu"]


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ("all", "'all' names no device \\(no GPU is here\\): use cpu:2"),
        ("cpu:0", "'cpu:0' names no device"),
        ("0,1", "names GPU 0, but 0 are here"),
        ("0,0", "is none of all, 0,1 \\(numbers of GPUs\\) and cpu:2"),
        ("cuda", "is none of all"),
        ("cpu:x", "is none of all"),
        ("", "is none of all"),
    ],
)
def test_devices_that_are_not_here_or_not_understood_are_refused(
    monkeypatch: pytest.MonkeyPatch, devices: str, words: str
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=words):
        worker_devices(make_config(devices))


def test_several_devices_and_a_device_map_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        worker_devices(make_config("cpu:2", device_map="auto"))


def test_without_a_launchers_variables_nothing_is_joined_and_with_them_devices_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert join_launcher(make_config(None)) is None
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="torchrun exclude each other"):
        join_launcher(make_config("cpu:2"))


def test_each_job_and_each_shard_number_is_dealt_once_until_a_stop(tmp_path: Path) -> None:
    store = HashStore()
    first, second = Dealer(store), Dealer(store)
    first.begin(np.array([5, 2, 9, 4]), [3, 0], num_tokens=100, num_bad=2)
    assert [dealer.next_job() for dealer in (first, second, second)] == [5, 2, 9]
    assert [dealer.next_shard(0) for dealer in (first, second)] == [3, 4]
    assert second.next_shard(1) == 0
    assert (second.add_tokens(11), first.add_tokens(0)) == (111, 111)
    assert first.add_bad(1) == 3
    second.stop()
    assert first.next_job() is None
    assert second.next_job() is None


def test_a_device_map_leaves_each_machine_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="one worker drives the whole map"):
        worker_devices(make_config("cpu", device_map="auto"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start torchrun with --nproc-per-node 1"):
        join_launcher(make_config(None, device_map="auto"))
