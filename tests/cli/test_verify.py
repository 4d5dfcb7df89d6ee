"""`dflash verify` on a cache that `dflash generate` made, whole and with real damage."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file

from dflash_cache.cache.index import SCHEMA, commit_fragment, list_index_files, open_index
from dflash_cache.cache.reader import Batch, CacheReader
from dflash_cache.cache.verify import verify
from dflash_cache.errors import CacheError

NUM_FLIPS = 200


@pytest.fixture
def cache(dflash, project: Path) -> Path:
    """A finished cache of 60 conversations and three prompts that the target answered."""
    tree = yaml.safe_load(project.read_text())
    tree["data"]["paths"].append(str(project.parent / "prompts.jsonl"))
    tree["respond"] = {"enabled": True, "max_new_tokens": 6}
    project.write_text(yaml.safe_dump(tree))
    assert dflash("generate", project).code == 0
    return project.parent / "cache"


def read_all(cache: Path) -> list[Batch]:
    with CacheReader(cache) as reader:
        return [reader.read_batch(np.array([row])) for row in range(len(reader.index.sample))]


def is_refused(cache: Path) -> bool:
    try:
        read_all(cache)
    except CacheError:
        return True
    return False


def equal(found: list[Batch], expected: list[Batch]) -> bool:
    return len(found) == len(expected) and all(
        torch.equal(*pair)
        for one, other in zip(found, expected, strict=True)
        for pair in zip(vars(one).values(), vars(other).values(), strict=True)
    )


def random_places(files: list[Path], count: int) -> Iterator[tuple[Path, int, int]]:
    """Half of the places in random files, half in random bytes of all; each with a random bit."""
    choose = random.Random(0)
    sizes = [path.stat().st_size for path in files]
    for i in range(count):
        path = choose.choice(files) if i % 2 else choose.choices(files, sizes)[0]
        yield path, choose.randrange(path.stat().st_size), choose.randrange(8)


def test_every_flipped_bit_is_found_and_never_trained_on(cache: Path) -> None:
    files = sorted(path for path in cache.rglob("*") if path.is_file() and path.stat().st_size)
    kinds = {path.relative_to(cache).parts[0] for path in files}
    assert {"manifest.json", "config.yaml", "jobs.parquet", "samples", "index", "responses", "bucket-0"} <= kinds
    expected = read_all(cache)
    assert verify(cache, full=True).findings == []
    for path, place, bit in random_places(files, NUM_FLIPS):
        whole = path.read_bytes()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :])
        where = f"bit {bit} of byte {place} of {path}"
        assert verify(cache, full=True).findings, where
        assert is_refused(cache) or equal(read_all(cache), expected), where
        path.write_bytes(whole)
    assert verify(cache, full=True).findings == []


def test_a_damaged_sample_is_named_and_after_repair_generate_redoes_its_job_alone(dflash, project, cache) -> None:
    before = open_index(cache)
    row = before.slice(7, 1).to_pylist()[0]
    shard = cache / row["shard"]
    expected = read_all(cache)
    data = bytearray(shard.read_bytes())
    data[4096 + row["row"] * 3 * 32 * 4] ^= 8  # the first byte of the sample
    shard.write_bytes(data)

    assert dflash("verify", cache).code == 0  # the structure is sound
    shown = dflash("verify", cache, "--full")
    assert shown.code == 2
    assert f"{row['shard']}, samples {row['sample']}: its checksum is not the index's." in shown.out
    report = json.loads(dflash("verify", cache, "--full", "--json").out)
    assert report["damaged_samples"] == [row["sample"]]
    assert report["findings"] == [
        {"place": row["shard"], "reason": "its checksum is not the index's", "samples": [row["sample"]]}
    ]

    same_job = before.filter(np.equal(before["job"].to_numpy(), row["job"]))["sample"].to_pylist()
    repaired = dflash("verify", cache, "--full", "--repair")
    assert f"{len(same_job)} samples are taken out" in repaired.out
    after = open_index(cache)
    assert sorted(set(before["sample"].to_pylist()) - set(after["sample"].to_pylist())) == same_job
    assert "are not cached" in dflash("verify", cache).out
    assert dflash("generate", project).code == 0
    assert dflash("verify", cache, "--full").code == 0
    assert equal(read_all(cache), expected)


def test_a_lost_and_a_cut_shard_cost_their_samples_and_repair_brings_them_back(dflash, project, cache) -> None:
    expected = read_all(cache)
    index = open_index(cache)
    lost, cut = sorted(set(index["shard"].to_pylist()))[-2:]  # the last numbers: new shards may take them again
    (cache / lost).unlink()
    (cache / cut).write_bytes((cache / cut).read_bytes()[:-1])
    report = json.loads(dflash("verify", cache, "--json").out)
    by_shard = {finding["place"]: finding for finding in report["findings"]}
    assert set(by_shard) == {lost, cut}
    for name in (lost, cut):
        listed = index.filter(np.equal(index["shard"].to_numpy(zero_copy_only=False), name))["sample"].to_pylist()
        assert by_shard[name]["samples"] == listed
    assert by_shard[lost]["reason"] == "the shard is missing"
    assert "bytes instead of" in by_shard[cut]["reason"]
    assert dflash("verify", cache, "--repair").code == 2
    assert dflash("generate", project).code == 0
    assert dflash("verify", cache, "--full").code == 0
    assert equal(read_all(cache), expected)


def test_a_shard_that_is_a_link_to_nowhere_is_missing(dflash, project, cache) -> None:
    lost = max(open_index(cache)["shard"].to_pylist())
    (cache / lost).unlink()
    (cache / lost).symlink_to(cache / "a disk that is not mounted")
    shown = dflash("verify", cache, "--full", "--repair")
    assert shown.code == 2
    assert "the shard is missing" in shown.out
    assert dflash("generate", project).code == 0
    assert dflash("verify", cache, "--full").code == 0


def test_a_damaged_index_is_set_aside_and_made_anew(dflash, project, cache) -> None:
    path = cache / "index" / "index.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    shown = dflash("verify", cache, "--repair")
    assert shown.code == 2
    assert "index/index.parquet: The index file" in shown.out
    assert (cache / "index" / "index.parquet.damaged").exists()
    assert dflash("generate", project).code == 0
    assert dflash("verify", cache, "--full").code == 0


def test_a_report_of_the_records_with_another_number_in_it_is_written_anew(dflash, project, cache) -> None:
    path = cache / "data_report.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"60", b"61", 1))
    shown = dflash("verify", cache, "--full", "--repair")
    assert (shown.code, "data_report.json: its bytes are not those" in shown.out) == (2, True)
    assert dflash("generate", project).code == 0
    assert dflash("verify", cache, "--full").code == 0
    assert path.read_bytes() == whole


@pytest.mark.parametrize("name", ["samples/samples.parquet", "jobs.parquet"])
@pytest.mark.parametrize("damage", ["lost", "cut"])
def test_tables_that_follow_from_the_data_are_written_anew(dflash, project, cache, name, damage) -> None:
    path = cache / name
    if damage == "lost":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-30])
    shown = dflash("verify", cache, "--repair")
    assert shown.code == 2
    assert (
        "it is missing: `dflash generate` writes it anew." if damage == "lost" else f"{name}: it is damaged"
    ) in shown.out
    assert not path.exists()
    assert dflash("generate", project).code == 0
    assert dflash("verify", cache, "--full").code == 0


def test_an_index_that_disagrees_with_the_samples_or_itself_is_told_sample_by_sample(cache: Path) -> None:
    rows = open_index(cache).to_pylist()
    rows[3]["length"] -= 1
    other = next(row for row in rows[12:] if row["bucket"] != rows[8]["bucket"])
    rows[8] = {**rows[8], "row": other["row"], "shard": other["shard"]}
    rows[11]["row"] = 10**6
    again = {**rows[2], "row": rows[2]["row"] + 1}
    list_index_files(cache)[0].unlink()
    table = table_of([*rows[:20], *rows[21:]])
    commit_fragment(cache, table, "a")
    commit_fragment(cache, table_of([again]), "b")
    reasons = {finding.reason.split(":")[0]: finding.samples.tolist() for finding in verify(cache, False).findings}
    assert reasons["their length is not that of samples/"] == [3]
    assert set(reasons["the index lets them overlap"]) >= {8, other["sample"]}
    assert reasons["the index gives them two places"] == [2]
    assert reasons[f"1 of {len(rows)} samples are not cached"] == [20]
    assert [11] in [samples for reason, samples in reasons.items() if "beyond the shard's" in reason]
    assert reasons["the index places them in a shard of another bucket"] == [8]


def table_of(rows: list[dict[str, object]]):
    return pa.Table.from_pylist(rows, SCHEMA)


def test_an_unfinished_cache_is_told_from_a_damaged_one(dflash, project, cache) -> None:
    path = list_index_files(cache)[0]
    table = pq.read_table(path)
    path.unlink()
    commit_fragment(cache, table.slice(0, 40), "a")
    report = json.loads(dflash("verify", cache, "--json").out)
    assert report["damaged_samples"] == []
    assert [finding["reason"] for finding in report["findings"]] == [
        f"{table.num_rows - 40} of {table.num_rows} samples are not cached: run `dflash generate`"
    ]


def test_there_is_no_cache(dflash, tmp_path: Path) -> None:
    outcome = dflash("verify", tmp_path)
    assert outcome.code == 2
    assert "There is no cache at" in outcome.err


def test_a_cache_from_before_there_were_seals_is_whole(cache: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    shutil.copytree(cache, old)
    for path in old.rglob("*.parquet"):
        pq.write_table(pq.read_table(path, partitioning=None).replace_schema_metadata(None), path)
    tree = json.loads((old / "manifest.json").read_text())
    del tree["seal"]
    (old / "manifest.json").write_text(json.dumps(tree))
    assert equal(read_all(old), read_all(cache))
    assert [finding.place for finding in verify(old, full=True).findings] == []


def test_an_honest_cache_agrees_with_its_target_and_another_target_is_told(dflash, project, cache, save_family) -> None:
    shown = dflash("verify", cache, "--against-target", 6)
    assert shown.code == 0, shown.out
    assert "The states of 6 samples" in shown.out
    assert "are the target's" in shown.out
    report = json.loads(dflash("verify", cache, "--against-target", 6, "--seed", 1, "--json").out)["against_target"]
    assert [layer["layer_id"] for layer in report["layers"]] == [0, 2, 4]
    assert report["head_agreement"] is None  # the last layer is not kept
    other = dflash("verify", cache, "--against-target", 2, "--target", save_family("qwen3"))
    assert other.code == 2
    assert "another target or another revision" in other.out
    assert "Another target: the manifest speaks of another" in other.out


def test_a_target_with_pickled_weights_computes_again_if_its_pickle_is_allowed(
    dflash, project: Path, llama_folder: Path
) -> None:
    target, cache = project.parent / "pickled", project.parent / "cache"
    shutil.copytree(llama_folder, target)
    torch.save(load_file(target / "model.safetensors"), target / "pytorch_model.bin")
    (target / "model.safetensors").unlink()
    allowed = ["--set", f"target.model={target}", "--set", "target.allow_pickle=true"]
    assert dflash("generate", project, *allowed).code == 0
    refused = dflash("verify", cache, "--against-target", 2)
    assert (refused.code, "set target.allow_pickle" in refused.err) == (2, True)
    assert dflash("verify", cache, "--against-target", 2, "--allow-pickle").code == 0


def test_a_damaged_cache_is_told_that_nothing_is_computed_again(dflash, cache) -> None:
    max(cache.glob("bucket-*/*")).unlink()
    shown = dflash("verify", cache, "--against-target", 2)
    assert shown.code == 2
    assert "Nothing is computed again: repair the cache and run `dflash generate` first." in " ".join(shown.out.split())
