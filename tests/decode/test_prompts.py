"""Question sets: which category each question is of, and what is refused."""

import json
from pathlib import Path

import pytest

from dflash_cache.config.settings import EvalSettings
from dflash_cache.decode.prompts import Question, load_questions
from dflash_cache.errors import ConfigError, DataError
from dflash_cache.target.load import Target


def write(path: Path, *records: dict) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


def load(target: Target, *paths: str, **settings: object) -> list[Question]:
    return load_questions(target.tokenizer, EvalSettings(prompts=paths, **settings))


def test_a_question_is_of_its_own_category_or_else_of_its_files(llama: Target, tmp_path: Path) -> None:
    mixed = write(
        tmp_path / "mixed.jsonl",
        {"prompt": "w1"},
        {"prompt": "w2", "category": "code"},
        {"turns": ["w3"], "category": None},
        {"messages": [{"role": "user", "content": "w4"}], "category": "maths"},
    )
    code = write(tmp_path / "code.jsonl", {"prompt": "w5", "response": "w6"})
    found = load(llama, mixed, code)
    assert [(one.category, one.number) for one in found] == [
        ("mixed", 0), ("code", 0), ("mixed", 1), ("maths", 0), ("code", 1),
    ]  # fmt: skip
    words = [f"<|im_start|> user w{i} <|im_end|> <|im_start|> assistant" for i in range(1, 6)]  # an answer is left out
    assert [llama.tokenizer.decode(one.ids) for one in found] == words


def test_files_of_one_name_are_told_apart_by_their_folders(llama: Target, tmp_path: Path) -> None:
    write(tmp_path / "gsm8k" / "test.jsonl", {"prompt": "w1"})
    write(tmp_path / "maths" / "test.jsonl", {"prompt": "w2"})
    write(tmp_path / "maths" / "hard.jsonl", {"prompt": "w3"})
    found = load(llama, str(tmp_path))
    assert [one.category for one in found] == ["gsm8k/test", "hard", "maths/test"]


def test_a_file_named_twice_is_asked_once(llama: Target, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "w1"}, {"prompt": "w2"})
    assert [one.number for one in load(llama, path, str(tmp_path / "*.jsonl"))] == [0, 1]


def test_max_prompts_counts_each_category_by_itself(llama: Target, tmp_path: Path) -> None:
    records = [{"prompt": f"w{i}", "category": "ab"[i % 2]} for i in range(7)]
    found = load(llama, write(tmp_path / "x.jsonl", *records), max_prompts=2)
    assert [(one.category, one.number) for one in found] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_unusable_questions_are_refused_with_their_place(llama: Target, tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", {"prompt": "w1"}, {"prompt": "w2", "category": 3})
    with pytest.raises(DataError, match=r"x\.jsonl:2 .*\(category is not a name\): mend or remove the record\.$"):
        load(llama, path)
    with pytest.raises(DataError, match=r"y\.jsonl:1 .*\(missing keys.*: mend or remove the record\.$"):
        load(llama, write(tmp_path / "y.jsonl", {"category": "code"}))
    with pytest.raises(DataError, match=r"No record can be used in .*z\.jsonl \(no records\)"):
        load(llama, write(tmp_path / "z.jsonl"))
    with pytest.raises(ConfigError, match=r"eval\.prompts names no file"):
        load(llama)
