"""What `dflash inspect-data` prints: the samples' text, and which of it is trained on."""

import json
import re

import numpy as np
from rich.text import Text

from dflash_cli.inspect_data import Sample, show_sample


def supervised(out: str) -> list[str]:
    return re.findall("⟦(.*?)⟧", out, re.DOTALL)


def test_the_answers_alone_are_marked_before_and_after_the_cache_is_made(dflash, project) -> None:
    before = dflash("inspect-data", project, "--first", 4, "--count", 2)
    assert before.code == 0
    lines = (project.parent / "data.jsonl").read_text().splitlines()
    answers = [json.loads(line)["messages"][1]["content"] for line in lines]
    found = supervised(before.out)
    assert len(found) == 2
    for number, text in zip((4, 5), found, strict=True):
        assert answers[number].split() == re.findall(r"\bw\d+\b", text)
        assert f"sample {number} (" in before.out
        assert f"data.jsonl:{number + 1}): " in before.out
    assert dflash("generate", project).code == 0
    (project.parent / "data.jsonl").unlink()
    after = dflash("inspect-data", project, "--first", 4, "--count", 2)
    assert after.out == before.out


def test_duplicates_are_counted_and_several_answers_are_marked_as_train_on_says(dflash, project) -> None:
    data = project.parent / "data.jsonl"
    messages = [
        {"role": role, "content": f"w{i} w1"} for i, role in enumerate(("user", "assistant", "user", "assistant"))
    ]
    data.write_text(f"{json.dumps({'messages': messages})}\n" * 3)
    both = dflash("inspect-data", project)
    assert "Left out 2 (first: " in both.out
    assert "data.jsonl:2): the same as a conversation before." in " ".join(both.out.split())
    assert [re.findall(r"\bw\d+\b", text) for text in supervised(both.out)] == [["w1", "w1"], ["w3", "w1"]]
    last = dflash("inspect-data", project, "--set", "data.train_on=last-assistant")
    assert [re.findall(r"\bw\d+\b", text) for text in supervised(last.out)] == [["w3", "w1"]]
    kept = dflash("inspect-data", project, "--set", "data.drop_duplicates=false")
    assert len(supervised(kept.out)) == 6


def test_a_sample_that_is_not_there_is_told(dflash, project) -> None:
    outcome = dflash("inspect-data", project, "--first", 60)
    assert outcome.code == 2
    assert "There is no sample 60: the data has 60, counted from 0" in " ".join(outcome.err.split())


def test_on_a_terminal_the_colour_tells_and_the_data_cannot_steer_it() -> None:
    sample = Sample(7, "a.jsonl:1", np.arange(4, dtype=np.int32), np.array([False, True, True, False]))
    texts = ["a", "b\x1b[2J", "c", "d"]
    shown = show_sample(sample, lambda ids: "".join(texts[i] for i in ids), in_colour=True)
    assert shown.plain == "sample 7 (a.jsonl:1): 4 tokens, 2 trained on\nab␛[2Jcd"
    begin = shown.plain.index("\n") + 1
    assert [(span.start - begin, span.end - begin, span.style) for span in shown.spans if span.start >= begin] == [
        (0, 1, "not bold dim"),
        (1, 7, "not bold green"),
        (7, 8, "not bold dim"),
    ]
    assert isinstance(shown, Text)
