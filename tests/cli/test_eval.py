"""`dflash eval` over question sets: one table, one JSON object, one picture; what cannot be right is refused."""

import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from rich.console import Console

from dflash_cache.decode.evaluate import Evaluation, Figures
from dflash_cache.decode.probe import Probe
from dflash_cli.acceptance_picture import draw
from dflash_cli.evaluate import _tabulate, show

CATEGORIES = {"code": 3, "maths": 2}
FIGURES = Figures(
    acceptance_length=13.456,
    tokens_per_pass=13.123,
    histogram={length: 9 - length for length in range(1, 9)},
    position_acceptance=[0.5] * 7,
    num_prompts=12345,
    num_tokens=99999,
    tokens_per_second=1234.5,
    tokens_per_second_plain=1567.8,
    speed_up=12.17,
    lossless=True,
    same=12345,
    ties=0,
    different=0,
    reread_tokens=0,
    extra_passes=0,
)


@pytest.fixture
def trained(dflash, project: Path) -> Path:
    """The project with a trained drafter and two question sets."""
    config = yaml.safe_load(project.read_text())
    config["train"]["epochs"] = 1
    config["eval"]["prompts"] = []
    for name, count in CATEGORIES.items():
        path = project.parent / f"{name}.jsonl"
        path.write_text("".join(f'{{"prompt": "w{7 * i} {" w9" * i} w5"}}\n' for i in range(count)))
        config["eval"]["prompts"].append(str(path))
    project.write_text(yaml.safe_dump(config))
    for command in ("generate", "train"):
        assert dflash(command, project).code == 0
    return project


def test_eval_tabulates_categories_and_takes_options_for_settings(dflash, trained: Path) -> None:
    picture = trained.parent / "pictures" / "acceptance.svg"
    outcome = dflash("eval", trained, "--plot", picture)
    assert outcome.code == 0, outcome.err
    lines = [line.split() for line in outcome.out.splitlines() if line.strip()]
    rows = {words[0]: words[1] for words in lines}
    assert (rows["code"], rows["maths"], rows["all"]) == ("3", "2", "5")
    assert "the target's own, token for token (5 same, 0 ties in rounding, 0 different)" in outcome.out
    words = " ".join(ElementTree.parse(picture).getroot().itertext())
    assert "acceptance length" in words
    assert all(f"{name} (" in words for name in CATEGORIES)
    assert outcome.out.endswith(f"\nThe picture is in {picture}.\n")

    plain = json.loads(dflash("eval", trained, "--json").out)
    assert "category  prompts  acceptance  per pass" in outcome.out
    (overall,) = (words for words in lines if words[0] == "all")
    assert overall[2:4] == [f"{plain['acceptance_length']:.3f}", f"{plain['tokens_per_pass']:.3f}"]
    passes = {int(length): count for length, count in plain["histogram"].items()}
    tokens = sum(length * count for length, count in passes.items())
    assert plain["tokens_per_pass"] == pytest.approx(tokens / sum(passes.values()))
    drawn_too = dflash("eval", trained, "--json", "--plot", picture)
    assert json.loads(drawn_too.out)["histogram"] == plain["histogram"]
    assert drawn_too.err == f"The picture is in {picture}.\n"
    of_the_run = json.loads(dflash("eval", trained, "--json", "--checkpoint", trained.parent / "run").out)
    assert of_the_run["histogram"] == plain["histogram"]
    assert {name: one["num_prompts"] for name, one in plain["categories"].items()} == CATEGORIES
    assert (plain["block_size"], plain["batch_size"], plain["temperature"]) == (4, 1, 0)
    batched = json.loads(dflash("eval", trained, "--json", "--batch-size", 4).out)
    assert batched["lossless"]
    assert (batched["histogram"], batched["batch_size"]) == (plain["histogram"], 4)
    short = json.loads(dflash("eval", trained, "--json", "--block-size", 2).out)
    assert short["lossless"]
    assert [*short["histogram"]] == ["1", "2"]
    assert len(short["position_acceptance"]) == 1

    drawn = [json.loads(dflash("eval", trained, "--json", "--temperature", 0.9, "--batch-size", n).out) for n in (1, 3)]
    assert drawn[0]["lossless"] is None
    assert drawn[0]["histogram"] == drawn[1]["histogram"]
    assert all(one["probe"]["difference"] < 1e-5 and one["probe"]["num_positions"] > 0 for one in drawn)
    other = dflash("eval", trained, "--json", "--temperature", 0.9, "--set", "eval.seed=5")
    assert json.loads(other.out)["histogram"] != drawn[0]["histogram"]
    outcome = dflash("eval", trained, "--temperature", 0.9)
    promise = (
        "output: drawn at temperature 0.9; tokens cannot be compared, but drafts are verified by a rule that keeps"
    )
    assert f"{promise} the target's distribution, and behind rejected drafts its logits were its own" in outcome.out
    assert "read again" not in outcome.out
    assert "token for token" not in outcome.out

    refused = {
        ("--block-size", 5): "eval.block_size is 5, but the drafter was trained on blocks of 4 slots",
        ("--block-size", 1): "eval.block_size",
        ("--temperature", -1): "eval.temperature",
        ("--batch-size", 0): "eval.batch_size",
        ("--plot", "acceptance.pdf"): "--plot acceptance.pdf is neither a .png nor a .svg file",
    }
    for options, sentence in refused.items():
        outcome = dflash("eval", trained, *options)
        assert outcome.code == 2
        assert outcome.out == ""
        assert sentence in outcome.err


def test_the_table_keeps_its_figures_whole_on_80_columns_whatever_the_categories_are_called() -> None:
    names = ("held_out", "a_file_with_a_long_name_" * 4)
    figures = replace(FIGURES, num_prompts=1234, same=1222, ties=12)
    shown = Console(file=io.StringIO(), width=80)
    shown.print(_tabulate(Evaluation(figures, dict.fromkeys(names, figures), 8, 0.0, 4)), soft_wrap=True)
    _, head, *rows = shown.file.getvalue().splitlines()
    assert " ".join(head.split()) == "category prompts acceptance per pass tokens/s without speed-up output"
    found = [" ".join(words[1:]) for words in map(str.split, rows) if len(words) > 1]
    assert found == ["1,234 13.456 13.123 1234.5 1567.8 12.17× 12 tie"] * 3
    assert "".join(words[0] for words in map(str.split, rows)) == "".join((*names, "all"))
    assert max(map(len, (head, *rows))) <= 80


def test_the_pictures_titles_are_inside_it() -> None:
    figure = draw(Evaluation(FIGURES, {"held_out": FIGURES}, 8, 0.0, 4))
    figure.draw_without_rendering()
    for axes in figure.axes:
        box = axes.title.get_window_extent()
        assert 0 <= box.x0 < box.x1 <= figure.bbox.width
        assert box.y1 <= figure.bbox.height
    assert not figure.axes[0].title.get_window_extent().overlaps(figure.axes[1].title.get_window_extent())


def test_the_distribution_is_promised_only_where_the_target_was_probed_and_what_was_read_again_is_told(capsys) -> None:
    figures = replace(FIGURES, lossless=None, reread_tokens=1_234, extra_passes=5)
    result = Evaluation(figures, {"any": figures}, 8, 0.7, 1)
    show(result)
    printed = capsys.readouterr().out
    assert "output: drawn at temperature 0.7; tokens cannot be compared\n" in printed
    assert "read again after rejected drafts: 1,234 tokens, 5 passes for that alone (recurrent layers; in" in printed
    show(replace(result, overall=replace(figures, reread_tokens=0), probe=Probe(1.23e-5, 4.56e-6, 26)))
    printed = capsys.readouterr().out
    assert "its logits were its own to rounding (1.2e-05, without drafts 4.6e-06; 26 positions)\n" in printed
    assert "read again" not in printed
