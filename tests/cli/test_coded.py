"""Every command on a coded cache."""

import json
import random
from pathlib import Path

import pytest
import torch
from cache.adopt.writers import write_modelopt
from cli.test_import import LAYER_IDS, capture_all

from dflash_cache.cache.index import open_index
from dflash_cache.cache.reader import CacheReader
from dflash_cache.cache.verify import verify


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_coded_cache_is_estimated_made_verified_shown_and_trained(dflash, project: Path, codec: str) -> None:
    cache, coded = project.parent / "cache", ("--set", f"generate.codec={codec}")
    report = json.loads(dflash("estimate", project, *coded, "--json").out)
    assert dflash("generate", project, *coded).code == 0
    sizes = [path.stat().st_size for path in cache.glob("bucket-*/*.safetensors")]
    assert report["num_bytes"] == sum(sizes)
    tokens = sum(open_index(cache)["length"].to_pylist())
    row_bytes = {"raw": 32 * 4, "int8": 32 + 7, "int4": 16 + 7}
    assert report["state_bytes_by_codec"] == {name: tokens * 3 * size for name, size in row_bytes.items()}
    assert dflash("verify", cache, "--full").code == 0
    rechecked = dflash("verify", cache, "--against-target", 20)
    assert rechecked.code == 0, rechecked.out
    shown = json.loads(dflash("inspect-buckets", cache, "--json").out)
    assert shown["codec"] == codec
    assert shown["bytes"] == sum(sizes) - 4096 * len(sizes)
    trained = dflash("train", project, *coded)
    assert trained.code == 0, trained.err
    losses = [json.loads(line)["loss"] for line in (project.parent / "run" / "log.jsonl").read_text().splitlines()]
    assert len(losses) > 8
    assert bool(torch.tensor(losses).isfinite().all())


def test_every_flipped_bit_of_a_coded_shard_is_found_and_repair_brings_the_same_bits_back(
    dflash, project: Path
) -> None:
    cache = project.parent / "cache"
    assert dflash("generate", project, "--set", "generate.codec=int4").code == 0
    before = open_index(cache)
    choose, shards = random.Random(0), sorted(cache.glob("bucket-*/*.safetensors"))
    for path in (choose.choice(shards) for _ in range(60)):
        whole = path.read_bytes()
        place = choose.randrange(600) if choose.random() < 0.5 else choose.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << choose.randrange(8)]) + whole[place + 1 :])
        assert verify(cache, full=True).findings, (path, place)
        last = path, whole, place
        path.write_bytes(whole)
    path, whole, _ = last
    path.write_bytes(whole[:4096] + bytes([whole[4096] ^ 1]) + whole[4097:])
    assert dflash("verify", cache, "--full", "--repair").code == 2
    assert dflash("generate", project, "--set", "generate.codec=int4").code == 0
    assert dflash("verify", cache, "--full").code == 0
    assert open_index(cache)["checksum"].to_pylist() == before["checksum"].to_pylist()


def test_an_import_can_code_what_it_copies(dflash, project: Path, llama_folder: Path) -> None:
    options = ("--set", "generate.token_budget=1", "--set", "generate.codec=int8")
    assert dflash("generate", project, *options).code == 0
    write_modelopt(
        project.parent / "dump", capture_all(project.parent / "cache", llama_folder, torch.float32), LAYER_IDS
    )
    outcome = dflash(
        "import", project.parent / "dump", project.parent / "imported", "--format", "modelopt", "--config", project,
        "--layer-ids", "0,2,4", "--numbering", "output", "--codec", "int8",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    with CacheReader(project.parent / "cache") as one, CacheReader(project.parent / "imported") as other:
        assert other.manifest.codec == "int8"
        assert one.index.checksum.tolist() == other.index.checksum.tolist()
    wrong = dflash(
        "import", project.parent / "dump", project.parent / "other", "--format", "modelopt", "--config", project,
        "--codec", "int3",
    )  # fmt: skip
    assert wrong.code == 2
    assert "generate.codec" in wrong.err
