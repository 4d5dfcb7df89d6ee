"""Prompts that the target's own template refuses are counted, and the others answered."""

import json
import shutil
from pathlib import Path

import pytest

from dflash_cache.cache.layout import read_manifest
from dflash_cache.data.conversations import RecordError
from dflash_cache.target.generate import generate
from dflash_cache.target.observer import Observer

REFUSAL = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system prompts here') }}{% endif %}"


class Counter(Observer):
    def __init__(self) -> None:
        self.reasons: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def skipped(self, reasons: dict[str, int], first: dict[str, str]) -> None:
        self.reasons |= reasons
        self.first |= first


@pytest.fixture
def strict_target(llama_folder: Path, tmp_path: Path) -> Path:
    """A target whose template knows no system prompts."""
    folder = tmp_path / "target"
    shutil.copytree(llama_folder, folder)
    template = folder / "chat_template.jinja"
    template.write_text(REFUSAL + template.read_text())
    return folder


@pytest.fixture
def config(configure, strict_target: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    ask = {"role": "user", "content": "w1 w2"}
    records = [[ask], [{"role": "system", "content": "w3"}, ask], [{"role": "user", "content": "w4 w5"}]]
    prompts.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in records))
    made = configure()
    changes = {
        "target": made.target.model_copy(update={"model": str(strict_target)}),
        "data": made.data.model_copy(update={"paths": (str(prompts),), "num_buckets": 1}),
        "respond": made.respond.model_copy(update={"enabled": True, "max_new_tokens": 4}),
    }
    return made.model_copy(update=changes)


def test_a_prompt_that_the_template_refuses_is_skipped_and_counted(config, tmp_path: Path) -> None:
    counter = Counter()
    generate(config, counter)
    assert read_manifest(tmp_path / "cache").num_samples == 2
    assert list(counter.reasons.values()) == [1]
    assert list(counter.first.values()) == [f"{tmp_path / 'prompts.jsonl'}:2"]


def test_a_prompt_that_the_template_refuses_stops_a_strict_run_before_any_answer(config, tmp_path: Path) -> None:
    strict = config.model_copy(update={"data": config.data.model_copy(update={"strict": True})})
    with pytest.raises(RecordError, match=r"prompts\.jsonl:2 .*no system prompts here"):
        generate(strict, Observer())
    assert not list((tmp_path / "cache").rglob("batch-*"))
