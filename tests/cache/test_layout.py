import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash_cache.cache.layout import (
    Manifest,
    difference,
    manifest_path,
    read_manifest,
    shard_name,
    shard_path,
    write_manifest,
)
from dflash_cache.errors import CacheError

MANIFEST = Manifest(
    tool_version="0.1.0",
    target_model="models/smol",
    target_revision=None,
    target_fingerprint="aa",
    tokenizer_fingerprint="bb",
    template_fingerprint="cc",
    mask_rule="assistant turns",
    layer_ids=(1, 3),
    target_num_layers=5,
    hidden_size=8,
    vocab_size=100,
    dtype="bfloat16",
    bucket_bounds=(16, 32),
    max_length=32,
    data_fingerprint="dd",
    num_samples=7,
    order_seed=0,
    settings={"token_budget": 64, "model": "größer"},
)


def change_entry(cache_dir: Path, **entries: Any) -> None:
    tree = json.loads(manifest_path(cache_dir).read_text()) | entries
    manifest_path(cache_dir).write_text(json.dumps({name: value for name, value in tree.items() if value != "gone"}))


def test_a_manifest_comes_back_equal(tmp_path: Path) -> None:
    write_manifest(tmp_path / "cache", MANIFEST)
    assert read_manifest(tmp_path / "cache") == MANIFEST


def test_last_states_are_named_in_the_manifest_and_without_them_it_is_the_older_versions(tmp_path: Path) -> None:
    with_last = replace(MANIFEST, layer_ids=(1, 3, 4), last_hidden=True)
    for name, manifest in (("plain", MANIFEST), ("last", with_last)):
        write_manifest(tmp_path / name, manifest)
        assert read_manifest(tmp_path / name) == manifest
        assert manifest.drafter_layer_ids == (1, 3)
    assert "last_hidden" not in json.loads(manifest_path(tmp_path / "plain").read_text())
    assert json.loads(manifest_path(tmp_path / "last").read_text())["last_hidden"] is True
    assert difference(MANIFEST, with_last) == [
        "layer_ids: was 1, 3, is 1, 3, 4",
        "last_hidden: was False, is True",
    ]


def test_a_folder_without_manifest_is_no_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheError) as caught:
        read_manifest(tmp_path)
    assert str(caught.value) == f"There is no cache at {tmp_path}: run `dflash generate` first."


def test_an_unknown_format_is_refused_before_anything_else_is_looked_at(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    change_entry(tmp_path, format_version=2, dtype="gone")
    with pytest.raises(CacheError) as caught:
        read_manifest(tmp_path)
    assert str(caught.value) == (
        f"The cache at {tmp_path} has format 2, this version of dflash-cache reads format 1: "
        "install the version that made it, or name another cache_dir and run `dflash generate`."
    )


def test_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    change_entry(tmp_path, codec="int2")
    with pytest.raises(CacheError) as caught:
        read_manifest(tmp_path)
    assert str(caught.value) == (
        f"The cache at {tmp_path} has the codec int2, this version of dflash-cache reads raw, int8, int4: install the "
        "version that made it, or name another cache_dir and run `dflash generate`."
    )


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"hidden_size": "gone", "codec": "gone"}, "lacks hidden_size, codec: "),
        ({"format_version": "gone"}, "lacks format_version: "),
        ({"colour": "blue"}, "has wrong entries \\(colour: "),
        ({"hidden_size": "8"}, "has wrong entries \\(hidden_size: "),
        ({"layer_ids": [1, -3]}, "has wrong entries \\(layer_ids.1: "),
        ({"layer_convention": "input of layer k"}, 'holds "input of layer k"'),
    ],
)
def test_a_manifest_with_missing_unknown_or_wrong_entries_is_refused(
    tmp_path: Path, entries: dict[str, Any], words: str
) -> None:
    write_manifest(tmp_path, MANIFEST)
    change_entry(tmp_path, **entries)
    with pytest.raises(CacheError, match=words):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
def test_broken_json_is_refused(tmp_path: Path, content: bytes) -> None:
    manifest_path(tmp_path).write_bytes(content)
    with pytest.raises(CacheError, match=r"The manifest .* restore it from a copy"):
        read_manifest(tmp_path)


def test_a_difference_names_each_entry_that_tells_other_bits_and_no_other() -> None:
    other = replace(MANIFEST, layer_ids=(1, 2, 3), target_revision="main", tool_version="9", settings={})
    assert difference(MANIFEST, other) == ["target_revision: was none, is main", "layer_ids: was 1, 3, is 1, 2, 3"]
    assert difference(MANIFEST, MANIFEST) == []


def test_a_shard_lies_where_the_index_names_it(tmp_path: Path) -> None:
    assert shard_name(2, 17) == "bucket-2/shard-000017.safetensors"
    assert shard_path(tmp_path, 2, 17) == tmp_path / shard_name(2, 17)
