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


def messages(*words: str) -> str:
    """A line of JSONL, user and assistant by turns."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": word} for i, word in enumerate(words)]
    return json.dumps({"messages": turns})


def test_every_record_is_counted_in_the_caches_report_and_shown_before_and_after(dflash, project) -> None:
    data = project.parent / "data.jsonl"
    lines = [
        messages("w1 w2", "w3 w4"),
        "{ no JSON",
        messages("w1 w2", "w3 w4"),  # the same as the first
        messages("w1", "w5 w6", "w1", " ".join(["w2"] * 60)),  # its second turn does not fit
        messages("w1", " ".join(["w2"] * 70)),  # not even the first one does
        json.dumps({"prompt": "w7 w8"}),
        json.dumps({"instruction": "w9", "input": "w10", "output": "w11 w12"}),
        json.dumps({"messages": [{"role": "king", "content": "w1"}]}),
    ]
    data.write_text("\n".join(lines) + "\n")
    flags = ("--set", "data.overlong=cut-turn", "--set", "data.num_buckets=1", "--set", "data.max_length=64")
    before = dflash("inspect-data", project, *flags)
    made = dflash("generate", project, *flags)
    assert (before.code, made.code) == (0, 0)
    report = json.loads((project.parent / "cache" / "data_report.json").read_text())["parts"]
    assert len(report) == 1
    assert report[0]["read"] == 8
    assert report[0]["kept"] == 3
    assert report[0]["left_out"] == {
        "invalid JSON": 1,
        "the same as a conversation before": 1,
        "unknown role": 1,
        "no answer, and respond.enabled is off": 1,
        "longer than data.max_length": 1,
    }
    numbers = {"the same as a conversation before": 3, "longer than data.max_length": 5, "unknown role": 8}
    assert {reason: f"{data}:{number}" for reason, number in numbers.items()}.items() <= report[0][
        "first_left_out"
    ].items()
    assert (report[0]["cut"], report[0]["truncated"]) == (1, 0)
    assert report[0]["shapes"] == {"messages": 3, "prompt": 1, "instruction": 1}
    # <|im_start|> role … <|im_end|>: a turn is its words and 3 more; of an answer all but its first two are trained on
    assert (report[0]["tokens"], report[0]["loss_tokens"]) == ((5 + 5) + (4 + 5) + (5 + 5), 3 + 3 + 3)
    told = "Of 8 records, 3 are samples and 5 are left out; 9 of 29 tokens are trained on."
    cut = "Cut at a turn, to fit data.max_length: 1."
    for outcome in (before, made, dflash("inspect-data", project, *flags)):
        assert told in " ".join(outcome.out.split())
        assert cut in " ".join(outcome.out.split())
        assert outcome.out.count("Left out 1 (first: ") == 5
    assert dflash("verify", project.parent / "cache").code == 0


def test_what_is_appended_has_a_report_of_its_own(dflash, project) -> None:
    assert dflash("generate", project).code == 0
    (project.parent / "data.jsonl").write_text("\n".join([messages("w1 w2", "w3 w4")] * 3) + "\n")
    assert dflash("generate", project, "--append").code == 0
    path = project.parent / "cache" / "data_report.json"
    written = path.read_bytes()
    parts = json.loads(written)["parts"]
    assert [(part["read"], part["kept"], part["left_out"]) for part in parts] == [
        (60, 60, {}),
        (3, 1, {"the same as a conversation before": 2}),
    ]
    assert dflash("generate", project, "--append").code == 0
    assert path.read_bytes() == written
    path.write_text("[]")
    outcome = dflash("inspect-data", project)
    assert outcome.code == 2
    told = "data_report.json cannot be read: delete it, nothing but its counts is lost."
    assert told in " ".join(outcome.err.split())
