"""A cache that grows: each part's samples once, in the buckets it began with, whoever comes back to complete it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from target.small_cache import Listener, checksums, conversation

from dflash_cache.cache.layout import read_manifest, samples_dir
from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.settings import Config
from dflash_cache.errors import CacheError
from dflash_cache.target.generate import generate
from dflash_cache.target.observer import Observer

Configure = Callable[..., Config]


@dataclass(frozen=True)
class Usage:
    """What `shutil.disk_usage` says."""

    free: int


def with_data(config: Config, folder: Path, begin: int, end: int) -> Config:
    """The configuration with the conversations begin … end − 1."""
    path = folder / f"data-{begin}-{end}.jsonl"
    path.write_text("".join(json.dumps(conversation(i)) + "\n" for i in range(begin, end)))
    return config.model_copy(update={"data": config.data.model_copy(update={"paths": (str(path),)})})


def test_an_appended_part_follows_the_first_and_holds_its_own_states(configure: Configure, tmp_path: Path) -> None:
    parts = [with_data(configure(), tmp_path, begin, end) for begin, end in ((0, 40), (40, 55), (55, 60))]
    generate(parts[0], Observer())
    bounds = read_manifest(tmp_path / "cache").bucket_bounds
    first = checksums(tmp_path / "cache")
    for part in parts[1:]:
        generate(part, Observer(), append=True)
    manifest = read_manifest(tmp_path / "cache")
    assert (manifest.num_samples, manifest.bucket_bounds, len(manifest.parts)) == (60, bounds, 3)
    assert first.items() <= checksums(tmp_path / "cache").items()
    stored = pq.read_table(samples_dir(tmp_path / "cache"))
    assert sorted(stored["sample"].to_pylist()) == list(range(60))
    assert not np.isin(manifest.mask_token_candidates, np.unique(np.concatenate(stored["input_ids"].to_pylist()))).any()
    generate(with_data(configure("alone"), tmp_path, 40, 55), Observer())
    with CacheReader(tmp_path / "cache") as grown, CacheReader(tmp_path / "alone") as alone:
        assert (grown.index.bucket == np.searchsorted(bounds, grown.index.length)).all()
        for sample in range(15):
            ours, theirs = grown.read_batch(np.array([40 + sample])), alone.read_batch(np.array([sample]))
            assert ours.input_ids.equal(theirs.input_ids)
            assert ours.hidden_STLH.allclose(theirs.hidden_STLH, rtol=1e-5, atol=1e-5)  # in other batches


def test_a_stopped_append_is_completed_to_the_bit_by_any_parts_data(configure: Configure, tmp_path: Path) -> None:
    def stop(call: int) -> None:
        if call == 3:
            raise KeyboardInterrupt

    for name in ("whole", "stopped", "other"):
        generate(with_data(configure(name), tmp_path, 0, 40), Observer())
    generate(with_data(configure("whole"), tmp_path, 40, 60), Observer(), append=True)
    for name in ("stopped", "other"):
        with pytest.raises(KeyboardInterrupt):
            generate(with_data(configure(name), tmp_path, 40, 60), Listener(stop), append=True)
        assert read_manifest(tmp_path / name).num_samples == 60
    generate(with_data(configure("stopped"), tmp_path, 40, 60), Observer(), append=True)
    generate(with_data(configure("other"), tmp_path, 0, 40), Observer())
    whole = checksums(tmp_path / "whole")
    assert sorted(whole) == list(range(60))
    assert checksums(tmp_path / "stopped") == whole
    assert checksums(tmp_path / "other") == whole
    again = Listener()
    generate(with_data(configure("other"), tmp_path, 40, 60), again, append=True)  # it is there: not added again
    assert again.estimate is not None
    assert again.estimate.remaining_tokens == 0
    assert read_manifest(tmp_path / "other").num_samples == 60


def test_other_data_without_append_and_other_settings_with_it_are_refused(configure: Configure, tmp_path: Path) -> None:
    generate(with_data(configure(), tmp_path, 0, 40), Observer())
    more = with_data(configure(), tmp_path, 40, 60)
    with pytest.raises(CacheError, match=r"num_samples: was 40, is 20.*or add new conversations alone with --append\."):
        generate(more, Observer())
    other = more.model_copy(update={"target": more.target.model_copy(update={"layer_ids": (0, 3)})})
    with pytest.raises(CacheError, match=r"layer_ids: was 0, 2, 4, is 0, 3\).* or take the configuration back\."):
        generate(other, Observer(), append=True)
    assert read_manifest(tmp_path / "cache").num_samples == 40
    assert len(list(samples_dir(tmp_path / "cache").iterdir())) == 1


def test_a_part_for_which_there_is_no_room_leaves_the_cache_complete(
    configure: Configure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(with_data(configure(), tmp_path, 0, 40), Observer())
    was, first = read_manifest(tmp_path / "cache"), checksums(tmp_path / "cache")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=99_999))
    with pytest.raises(CacheError, match=r"needs 1 MB more and .* has 0 MB free: make room"):
        generate(with_data(configure(), tmp_path, 40, 60), Observer(), append=True)
    assert read_manifest(tmp_path / "cache") == was  # so it can be trained from
    assert checksums(tmp_path / "cache") == first
    monkeypatch.undo()
    generate(with_data(configure(), tmp_path, 40, 60), Observer(), append=True)
    assert len(checksums(tmp_path / "cache")) == 60


def test_a_part_that_the_manifest_does_not_name_is_not_there(configure: Configure, tmp_path: Path) -> None:
    generate(with_data(configure(), tmp_path, 0, 40), Observer())
    generate(with_data(configure(), tmp_path, 40, 60), Observer(), append=True)
    samples = samples_dir(tmp_path / "cache")
    generate(with_data(configure("killed"), tmp_path, 0, 40), Observer())
    (samples_dir(tmp_path / "killed") / "samples_000001.parquet").write_bytes(
        (samples / "samples_000001.parquet").read_bytes()
    )  # as if the kill had come before the manifest
    assert read_manifest(tmp_path / "killed").num_samples == 40
    generate(with_data(configure("killed"), tmp_path, 45, 60), Observer(), append=True)
    assert sorted(checksums(tmp_path / "killed")) == list(range(55))
