"""Coded caches: the states are those of a plain cache, coded; stopping and killing change no bit."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from target.small_cache import ENVIRONMENT, NUM_SAMPLES, TOKEN_BYTES, Listener, checksums

from dflash_cache.cache.codec import code_states
from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.dtypes import Codec
from dflash_cache.config.loading import dump_config
from dflash_cache.config.settings import Config
from dflash_cache.errors import CacheError, ConfigError
from dflash_cache.target.generate import generate
from dflash_cache.target.observer import Observer

Configure = Callable[..., Config]


@pytest.mark.parametrize(("codec", "row_bytes"), [("int8", 32 + 2 + 4 + 1), ("int4", 16 + 2 + 4 + 1)])
def test_the_states_are_a_plain_caches_states_coded_and_so_much_smaller(
    configure: Configure, tmp_path: Path, codec: Codec, row_bytes: int
) -> None:
    listener = Listener()
    generate(configure("plain"), Observer())
    generate(configure("coded", codec=codec), listener)
    assert listener.estimate is not None
    assert listener.estimate.token_bytes == 3 * row_bytes + 5 < TOKEN_BYTES
    assert sorted(checksums(tmp_path / "coded")) == list(range(NUM_SAMPLES))
    with CacheReader(tmp_path / "plain") as plain, CacheReader(tmp_path / "coded") as coded:
        for row in range(NUM_SAMPLES):
            one, other = (reader.read_batch(np.array([row])) for reader in (plain, coded))
            assert torch.equal(other.hidden_STLH[0], code_states(coded.manifest.states, one.hidden_STLH[0]))
            assert torch.equal(other.input_ids, one.input_ids)
            assert torch.equal(other.loss_mask, one.loss_mask)


def test_twelve_kills_at_random_instants_change_no_coded_bit(configure: Configure, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(configure(codec="int4")))
    program = [sys.executable, str(Path(__file__).with_name("killing.py")), str(path), "1", "12", "3"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["victims"]) == 12
    whole = checksums(report["whole"])
    for cache in report["caches"]:
        assert checksums(cache) == whole


def test_another_codec_for_an_old_cache_is_refused_with_the_difference(configure: Configure) -> None:
    generate(configure(), Observer())
    for append in (False, True):
        with pytest.raises(CacheError, match=r"codec: was raw, is int8"):
            generate(configure(codec="int8"), Observer(), append)


def test_a_hidden_size_that_no_group_fits_is_refused_before_anything_is_written(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash_cache.cache.state_format._LEAST_GROUP", 48)
    with pytest.raises(ConfigError, match="a multiple of 48, the target's is 32: set "):
        generate(configure(codec="int8"), Observer())
    assert not (tmp_path / "cache" / "manifest.json").exists()
