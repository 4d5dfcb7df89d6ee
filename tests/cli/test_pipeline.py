"""All stages in a row on a tiny target, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from dflash_cache.cache.index import open_index
from dflash_cache.cache.reader import CacheReader
from dflash_cache.train.checkpoint import latest_path, load_checkpoint


def test_the_cache_holds_every_samples_states_as_an_unbatched_forward_gives_them(dflash, project: Path) -> None:
    outcome = dflash("generate", project)
    assert outcome.code == 0, outcome.err
    assert "60 samples" in outcome.out
    assert "are free." in outcome.out
    config = yaml.safe_load(project.read_text())
    model = AutoModelForCausalLM.from_pretrained(config["target"]["model"], dtype=torch.float32)
    with CacheReader(Path(config["cache_dir"])) as reader:
        assert reader.index.sample.tolist() == list(range(60))
        for row in range(60):
            batch = reader.read_batch(np.array([row]))
            states = model(batch.input_ids, output_hidden_states=True).hidden_states
            expected = torch.stack([states[k + 1] for k in (0, 2, 4)], dim=2)
            torch.testing.assert_close(batch.hidden_STLH, expected, rtol=1e-5, atol=1e-5)
            length = int(batch.length[0])
            answer_words = 4 + row % 30
            assert batch.loss_mask[0].sum() == answer_words + 1  # the answer and its stop token
            assert not batch.loss_mask[0, : length - answer_words - 1].any()


def test_one_cache_trains_two_drafters_and_a_finished_stage_is_not_redone(dflash, project: Path) -> None:
    assert dflash("generate", project).code == 0
    cache = project.parent / "cache"
    before = {path: path.stat().st_mtime_ns for path in cache.glob("bucket-*/*")}
    first = dflash("train", project)
    assert first.code == 0, first.err
    assert "Training is complete" in first.out
    other = project.parent / "other"
    second = dflash(
        "train", project, "--set", f"run_dir={other}", "--set", "drafter.block_size=6", "--set", "train.seed=1"
    )
    assert second.code == 0, second.err
    assert load_checkpoint(latest_path(other)).shape["block_size"] == 6
    assert {path: path.stat().st_mtime_ns for path in cache.glob("bucket-*/*")} == before
    again = dflash("generate", project)
    assert again.code == 0
    assert "0 B of it still to be written" in again.out.replace("\n", " ")
    assert {path: path.stat().st_mtime_ns for path in cache.glob("bucket-*/*")} == before


def test_a_run_stopped_in_the_middle_ends_with_the_same_bits_as_one_that_was_not(dflash, project: Path) -> None:
    assert dflash("generate", project).code == 0
    whole, parts = project.parent / "whole", project.parent / "parts"
    assert dflash("train", project, "--set", f"run_dir={whole}").code == 0
    num_steps = load_checkpoint(latest_path(whole)).step
    assert num_steps > 8
    for _ in range(num_steps):  # each time only the steps to the next checkpoint survive
        script = (
            "import sys, os\n"
            "from dflash_cache.train import loop\n"
            "take, count = loop.take_step, []\n"
            "def step(*args):\n"
            "    if len(count) == 5: os._exit(9)\n"
            "    count.append(1)\n"
            "    return take(*args)\n"
            "loop.take_step = step\n"
            "from dflash_cli.__main__ import main\n"
            f"sys.argv = ['dflash', 'train', {str(project)!r}, '--set', 'run_dir={parts}']\n"
            "main()\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
        assert done.returncode == 9, done.stderr
    one, other = load_checkpoint(latest_path(whole)), load_checkpoint(latest_path(parts))
    assert other.step == num_steps
    assert all(torch.equal(tensor, other.drafter[name]) for name, tensor in one.drafter.items())
    logs = [[json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in (whole, parts)]
    kept = [[(line["kind"], line["step"], line["loss"]) for line in log] for log in logs]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("launcher", ["torchrun", "--devices"])
def test_two_ranks_show_each_line_once_and_train_what_one_rank_trains(dflash, project: Path, launcher: str) -> None:
    assert dflash("generate", project).code == 0
    one, two = project.parent / "one", project.parent / "two"
    assert dflash("train", project, "--set", f"run_dir={one}", "--set", "train.accumulation=4").code == 0
    command = ["-m", "dflash_cli", "train", str(project), "--set", f"run_dir={two}", "--set", "train.accumulation=2"]
    if launcher == "torchrun":
        launch = [str(Path(sys.executable).parent / "torchrun"), "--standalone", "--nproc-per-node", "2", *command]
    else:
        launch = [sys.executable, *command, "--devices", "cpu:2"]
    done = subprocess.run(launch, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.count("Training is complete") == 1
    logs = [[json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in (one, two)]
    assert [(line["kind"], line["step"]) for line in logs[0]] == [(line["kind"], line["step"]) for line in logs[1]]
    assert [line["loss"] for line in logs[0]] == pytest.approx([line["loss"] for line in logs[1]], abs=1e-4)
    assert load_checkpoint(latest_path(two)).identity == load_checkpoint(latest_path(one)).identity


def test_a_killed_generate_goes_on_and_leaves_the_same_states(dflash, project: Path) -> None:
    script = (
        "import sys, os\n"
        "from dflash_cache.cache.writer import CacheWriter\n"
        "append, count = CacheWriter.append, []\n"
        "def job(*args):\n"
        "    if len(count) == 8: os._exit(9)\n"
        "    count.append(1)\n"
        "    append(*args)\n"
        "CacheWriter.append = job\n"
        "from dflash_cli.__main__ import main\n"
        f"sys.argv = ['dflash', 'generate', {str(project)!r}, '--set', 'generate.shard_bytes=5000']\n"
        "main()\n"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 9
    committed = len(open_index(project.parent / "cache"))
    assert 0 < committed < 60
    resumed = dflash("generate", project, "--set", "generate.shard_bytes=5000")
    assert resumed.code == 0, resumed.err
    whole = project.parent / "whole"
    assert dflash("generate", project, "--set", f"cache_dir={whole}").code == 0
    with CacheReader(project.parent / "cache") as one, CacheReader(whole) as other:
        rows = np.arange(60)
        for left, right in zip(vars(one.read_batch(rows)).values(), vars(other.read_batch(rows)).values(), strict=True):
            assert torch.equal(left, right)


def test_eval_and_export_take_the_trained_drafter(dflash, project: Path) -> None:
    assert dflash("generate", project).code == 0
    assert dflash("train", project).code == 0
    outcome = dflash("eval", project, "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert result["lossless"]
    assert result["same"] == result["num_prompts"] == 3
    assert dflash("eval", project).code == 0
    out = project.parent / "drafter"
    assert dflash("export", project, out, "--dtype", "float32").code == 0
    assert json.loads(dflash("eval", project, "--json", "--checkpoint", out).out)["histogram"] == result["histogram"]
    again = dflash("export", project, out)
    assert (again.code, again.err) == (2, f"Error: {out} exists already: name another folder, or remove it.\n")


def test_a_drafter_with_sliding_windows_is_trained_exported_and_measured_alike(dflash, project: Path) -> None:
    window = [
        *("--set", "drafter.num_layers=2", "--set", "drafter.sliding_window=6"),
        *("--set", "drafter.layer_types=[sliding_attention, full_attention]"),
    ]
    assert dflash("generate", project).code == 0
    assert dflash("train", project, *window).code == 0
    result = json.loads(dflash("eval", project, *window, "--json").out)
    assert result["same"] == result["num_prompts"] == 3
    out = project.parent / "drafter"
    assert dflash("export", project, out, "--dtype", "float32").code == 0
    config = json.loads((out / "config.json").read_text())
    assert (config["layer_types"], config["sliding_window"]) == (["sliding_attention", "full_attention"], 6)
    assert json.loads(dflash("eval", project, "--json", "--checkpoint", out).out)["histogram"] == result["histogram"]
    again = dflash("train", project, *window, "--set", f"run_dir={project.parent}/again", "--from", out)
    assert again.code == 0, again.err
    full = dflash("train", project, "--set", "drafter.num_layers=2", "--set", f"run_dir={project}-full", "--from", out)
    assert full.code == 2
    assert "sliding_window: there 6, here None" in full.err.replace("\n", " ")


def test_prompts_without_answers_are_answered_by_the_target(dflash, project: Path) -> None:
    prompts = project.parent / "prompts.jsonl"
    outcome = dflash(
        "generate", project, "--set", f"data.paths=[{prompts}]", "--set", "respond.enabled=true",
        "--set", "respond.max_new_tokens=9", "--set", "data.num_buckets=1",
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    samples = pq.read_table(project.parent / "cache" / "samples")
    config = yaml.safe_load(project.read_text())
    model = AutoModelForCausalLM.from_pretrained(config["target"]["model"], dtype=torch.float32)
    for ids, mask in zip(samples["input_ids"].to_pylist(), samples["loss_mask"].to_pylist(), strict=True):
        begin = mask.index(True)
        choices = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        assert choices[begin - 1 : -1] == ids[begin:]  # every answer token is the target's own greedy choice


def test_inspect_buckets_agrees_with_the_index(dflash, project: Path) -> None:
    assert dflash("generate", project).code == 0
    cache = project.parent / "cache"
    report = json.loads(dflash("inspect-buckets", cache, "--json", "--token-budget", 128, "--accumulation", 3).out)
    table = open_index(cache).to_pydict()
    assert sum(bucket["samples"] for bucket in report["buckets"]) == 60
    for bucket in report["buckets"]:
        lengths = [n for n, b in zip(table["length"], table["bucket"], strict=True) if b == bucket["bucket"]]
        assert (bucket["samples"], bucket["tokens"]) == (len(lengths), sum(lengths))
        assert all(bucket["shortest"] <= n <= bucket["longest"] for n in lengths)
    assert report["mix"]["interleaved"]["kl_mean"] < report["mix"]["sequential"]["kl_mean"]
    shown = dflash("inspect-buckets", cache)
    assert shown.code == 0
    assert "█" in shown.out


@pytest.mark.parametrize("command", [["dflash"], ["python", "-m", "dflash_cli"]])
def test_both_ways_to_start_are_the_same(command: list[str]) -> None:
    program = [str(Path(sys.executable).parent / command[0]), *command[1:], "--help"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert "inspect-buckets" in done.stdout
