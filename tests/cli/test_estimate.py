import json
import shutil
from pathlib import Path

import pytest
import yaml

from dflash_cache.cache.index import open_index


@pytest.mark.parametrize("shard_bytes", [20_000, 150_000, 10**9])
def test_the_estimate_is_the_size_of_the_cache_that_is_then_made(dflash, project: Path, shard_bytes: int) -> None:
    tree = yaml.safe_load(project.read_text())
    tree["generate"]["shard_bytes"] = shard_bytes
    project.write_text(yaml.safe_dump(tree))
    cache = project.parent / "cache"
    rates = ("--tokens-per-second", 500, "--train-tokens-per-second", 1000, "--storage-gb-per-second", 0.01)
    report = json.loads(dflash("estimate", project, *rates, "--json").out)
    assert not cache.exists()
    assert dflash("generate", project).code == 0
    index = open_index(cache)
    tokens = sum(index["length"].to_pylist())
    shards = list(cache.glob("bucket-*/*.safetensors"))
    assert (report["num_samples"], report["num_tokens"], report["num_open"]) == (60, tokens, 0)
    assert report["token_bytes"] == 3 * 32 * 4 + 5  # layers, hidden, float32; id and mask
    assert report["num_shards"] == len(shards)
    assert report["num_bytes"] == sum(path.stat().st_size for path in shards)
    assert report["generate_seconds"] == tokens / 500
    assert report["needed_gb_per_second"] == 1000 * report["token_bytes"] / 1e9
    assert report["fits"]
    assert report["pays"]
    assert report["passes_until_it_pays"] == 2


def test_answers_that_are_not_written_yet_count_with_their_greatest_length(dflash, project: Path) -> None:
    tree = yaml.safe_load(project.read_text())
    tree["data"]["paths"] = [str(project.parent / "prompts.jsonl")]
    tree["respond"] = {"enabled": True, "max_new_tokens": 9}
    project.write_text(yaml.safe_dump(tree))
    report = json.loads(dflash("estimate", project, "--json").out)
    # <|im_start|> user w w w <|im_end|> <|im_start|> assistant, then nine tokens
    assert (report["num_samples"], report["num_open"], report["num_tokens"]) == (3, 3, 3 * (8 + 9))
    shown = dflash("estimate", project)
    assert "at most 51 tokens" in shown.out
    assert "3 answers are still to be written" in shown.out


def test_the_sentences_say_what_is_known(dflash, project: Path) -> None:
    shown = dflash("estimate", project)
    assert shown.code == 0
    assert "the cache takes" in shown.out
    assert "are free where it will lie." in shown.out
    assert "It pays" not in shown.out
    slow = dflash("estimate", project, "--tokens-per-second", 1e9, "--storage-gb-per-second", 0.001)
    assert "It never pays in time" in slow.out


def test_of_a_store_no_free_space_is_told(dflash, project: Path) -> None:
    local = json.loads(dflash("estimate", project, "--json").out)
    remote = json.loads(dflash("estimate", project, "--set", "cache_dir=s3://bucket/cache", "--json").out)
    assert remote == local | {"free_bytes": None, "fits": None}
    shown = dflash("estimate", project, "--set", "cache_dir=s3://bucket/cache")
    assert "How much room its store has is not known here." in shown.out


def test_without_answers_and_without_respond_there_is_nothing_to_estimate(dflash, project: Path) -> None:
    outcome = dflash("estimate", project, "--set", f"data.paths=[{project.parent / 'prompts.jsonl'}]")
    assert outcome.code == 2
    assert "respond.enabled is off" in outcome.err


def test_prompts_that_the_template_refuses_are_counted_as_generate_counts_them(dflash, project: Path) -> None:
    tree = yaml.safe_load(project.read_text())
    target = project.parent / "target"
    shutil.copytree(tree["target"]["model"], target)
    template = target / "chat_template.jinja"
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompts') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    prompts = project.parent / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + json.dumps({"prompt": "w1", "system": "w2"}) + "\n")
    tree |= {"respond": {"enabled": True, "max_new_tokens": 9}}
    tree["target"]["model"] = str(target)
    tree["data"]["paths"] = [str(prompts)]
    project.write_text(yaml.safe_dump(tree))
    shown = dflash("estimate", project)
    assert shown.code == 0
    assert f"Left out 1 (first: {prompts}:4): refused by the chat template." in " ".join(shown.out.split())
    assert "3 answers are still to be written" in shown.out
    strict = dflash("estimate", project, "--set", "data.strict=true")
    assert strict.code == 2
    assert "refused by the chat template: no system prompts" in " ".join(strict.err.split())
