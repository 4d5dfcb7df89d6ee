"""A target spread by accelerate over the CPU and the disk: the hooks that GPUs would need run here, too."""

from collections.abc import Callable
from pathlib import Path

import pytest
from target.small_cache import checksums

from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.settings import Config
from dflash_cache.target.generate import generate
from dflash_cache.target.load import load_target
from dflash_cache.target.observer import Observer
from dflash_cache.target.recheck import recheck


@pytest.fixture
def spread(configure: Callable[..., Config]) -> Config:
    """A configuration whose target has room in memory for its first layers alone."""
    config = configure("spread")
    changes = {"device_map": "auto", "max_memory": {"cpu": "150KB"}}
    return config.model_copy(update={"target": config.target.model_copy(update=changes)})


def test_a_spread_target_makes_the_same_cache_and_finds_it_right(
    configure: Callable[..., Config], spread: Config, tmp_path: Path
) -> None:
    plain = configure("plain").model_copy(update={"target": spread.target.model_copy(update={"device_map": None})})
    layer_ids = (0, 2, 5)  # the last one: the head is compared, from behind the final norm
    for config in (plain, spread):
        target = config.target.model_copy(update={"layer_ids": layer_ids})
        generate(config.model_copy(update={"target": target}), Observer())
    assert checksums(tmp_path / "plain") == checksums(tmp_path / "spread")
    target = load_target(spread.target.model_copy(update={"layer_ids": layer_ids}))
    assert {parameter.device.type for parameter in target.model.parameters()} == {"cpu", "meta"}
    with CacheReader(tmp_path / "plain") as reader:
        found = recheck(reader, target, 6, 0, lambda done, total: None)
    assert found.is_right
    assert found.head_agreement == 1.0
