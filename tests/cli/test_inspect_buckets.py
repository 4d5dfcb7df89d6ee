"""`dflash inspect-buckets` against the index and the plan: orders side by side, bounds compared, pictures."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_cache.cache.index import open_index
from dflash_cache.config.settings import TrainSettings
from dflash_cache.data.mixing import measure_mix
from dflash_cache.data.plan import decode_plan
from dflash_cache.train.sampler import EpochOrder
from dflash_cli.bucket_pictures import MAX_BARS, _draw_steps

OPTIONS = ("--token-budget", 128, "--accumulation", 3, "--world-size", 2)


@pytest.fixture
def cache(dflash, project: Path) -> Path:
    assert dflash("generate", project).code == 0
    return project.parent / "cache"


def test_each_order_is_shown_and_the_pull_keeps_the_mix_of_the_interleaved_list(dflash, cache) -> None:
    mix = json.loads(dflash("inspect-buckets", cache, "--json", *OPTIONS).out)["mix"]
    assert list(mix) == ["sequential", "shuffled", "interleaved, buffer 0", "interleaved"]
    assert mix["sequential"]["kl_mean"] > mix["shuffled"]["kl_mean"] > mix["interleaved"]["kl_mean"]
    assert mix["interleaved"]["kl_mean"] == mix["interleaved, buffer 0"]["kl_mean"]
    assert mix["interleaved"]["runs"] != mix["interleaved, buffer 0"]["runs"]
    assert len({figures["num_micro_batches"] for figures in mix.values()}) == 1
    shown = dflash("inspect-buckets", cache, *OPTIONS)
    for order, figures in mix.items():
        (line,) = [line for line in shown.out.splitlines() if line.split("  ")[0] == order]
        assert f"{figures['kl_mean']:.4f}" in line


def test_the_best_bounds_pad_less_and_the_figures_are_those_of_the_index(dflash, cache) -> None:
    report = json.loads(dflash("inspect-buckets", cache, "--json", "--suggest", *OPTIONS).out)
    table = open_index(cache).to_pydict()
    lengths, buckets = np.array(table["length"]), np.array(table["bucket"])
    present, best = report["bounds"]["present"], report["bounds"]["best"]
    assert present["bounds"] == [bucket["longest"] for bucket in report["buckets"]]
    assert present["padding_efficiency"] == pytest.approx(report["padding_efficiency"])
    longest = [lengths[buckets == bucket].max() for bucket in buckets]
    assert present["bucket_efficiency"] == pytest.approx(lengths.sum() / sum(longest))
    assert best["bucket_efficiency"] >= present["bucket_efficiency"]
    assert len(best["bounds"]) == len(present["bounds"])
    two = json.loads(dflash("inspect-buckets", cache, "--json", "--buckets", 2).out)["bounds"]["best"]["bounds"]
    assert len(two) == 2
    assert two[-1] == 64
    waste = {x: sum(max(lengths[lengths <= x]) - n if n <= x else lengths.max() - n for n in lengths) for x in lengths}
    assert waste[two[0]] == min(waste[x] for x in lengths if x < lengths.max())
    assert f"--set data.bucket_bounds=[{two[0]},64]" in dflash("inspect-buckets", cache, "--buckets", 2).out


def test_a_png_and_a_page_that_needs_nothing_else_are_drawn(dflash, cache, tmp_path) -> None:
    picture, page = tmp_path / "report.png", tmp_path / "pages" / "report.html"
    for path in (picture, page):
        outcome = dflash("inspect-buckets", cache, "--plot", path, "--json", *OPTIONS)
        assert (outcome.code, outcome.err) == (0, f"The picture is in {path}.\n")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert "<svg" in text
    assert not any(word in text for word in ("<script", "<link", "<img", 'href="http', 'src="'))
    figures = text.split("<pre>")[1].split("</pre>")[0].replace("&quot;", '"')
    assert json.loads(figures) == json.loads(outcome.out)


def test_a_panel_shows_each_steps_shares_or_those_of_every_so_many_th_step() -> None:
    from matplotlib.figure import Figure

    from dflash_cache.data.mixing import measure_mix

    for num_steps, stride in ((5, 1), (MAX_BARS, 1), (MAX_BARS + 1, 2)):
        buckets = np.random.default_rng(0).integers(0, 3, 4 * num_steps)
        figures = measure_mix(buckets, 4 * np.arange(num_steps + 1), 3)
        axes = Figure().subplots()
        _draw_steps(axes, figures, "a title", ["red", "green", "blue"])
        data = [patch.get_data() for patch in axes.patches]
        drawn = np.stack([values - baseline for values, _, baseline in data], 1)
        assert drawn == pytest.approx(25.0 * figures.counts_nK[::stride])
        assert axes.get_ylim() == (0, 100)


def test_a_picture_of_another_kind_is_refused(dflash, cache) -> None:
    outcome = dflash("inspect-buckets", cache, "--plot", "report.gif")
    expected = "Error: --plot report.gif is neither a .png nor a .html file: name one of these.\n"
    assert (outcome.code, outcome.err) == (2, expected)


def test_without_matplotlib_it_says_what_to_install(dflash, cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome = dflash("inspect-buckets", cache, "--plot", tmp_path / "report.png")
    assert (outcome.code, outcome.err) == (
        2,
        "Error: --plot needs matplotlib, which is not installed: run `pip install 'dflash-cache[plot]'`.\n",
    )
    assert dflash("inspect-buckets", cache).code == 0


def test_it_answers_without_loading_torch(cache) -> None:
    script = (
        "import sys\n"
        "from dflash_cli.__main__ import main\n"
        f"sys.argv = ['dflash', 'inspect-buckets', {str(cache)!r}]\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_it_plans_what_training_sees_without_the_held_out_samples(dflash, cache, project) -> None:
    assert dflash("train", project, "--set", "train.max_steps=1").code == 0
    plan = decode_plan((project.parent / "run" / "plans" / "epoch-000.parquet").read_bytes())
    options = ("--token-budget", 128, "--accumulation", 3, "--validation-share", 0.1)
    report = json.loads(dflash("inspect-buckets", cache, "--json", *options).out)
    order = EpochOrder.from_plan(plan, TrainSettings(token_budget=128, accumulation=3), 0)
    figures = measure_mix(plan.bucket[order.order], order.bounds, 3, report["padding_efficiency"])
    assert report["mix"]["interleaved"] == json.loads(json.dumps(figures.to_dict()))
    assert report["held_out_samples"] == 60 - len(plan.rows) == 6
    assert report["num_micro_batches"] == plan.num_micro_batches
    assert report["padding_efficiency"] == pytest.approx(plan.tokens.sum() / plan.padded_tokens.sum())


def test_it_says_how_the_remainder_is_spread_and_which_buckets_can_be_missed(dflash, cache) -> None:
    outcome = dflash("inspect-buckets", cache, "--token-budget", 128)
    count = json.loads(dflash("inspect-buckets", cache, "--json", "--token-budget", 128).out)["num_micro_batches"]
    size = count - 1  # one is left over
    outcome = dflash("inspect-buckets", cache, "--token-budget", 128, "--accumulation", size)
    sizes = str(count // 2) if count % 2 == 0 else f"{count // 2} or {count // 2 + 1}"
    assert f"2 steps of {sizes} (at most {size}; what is left over is spread)." in outcome.out
    assert "* of those with a share of one micro-batch a step or more" in outcome.out
    whole = dflash("inspect-buckets", cache, "--token-budget", 128, "--accumulation", count)
    assert f" 1 steps of {count}." in whole.out


def test_a_cache_without_samples_is_refused_with_what_to_do(dflash, cache) -> None:
    for path in [*cache.glob("index/*"), *cache.glob("bucket-*/*")]:
        path.unlink()
    outcome = dflash("inspect-buckets", cache)
    assert outcome.code == 2
    assert outcome.err == f"Error: The cache at {cache} holds no samples yet: run `dflash generate` first.\n"


def test_a_configuration_gives_what_training_will_have_and_an_option_goes_before_it(dflash, cache, project) -> None:
    report = json.loads(dflash("inspect-buckets", cache, "--json", "--config", project).out)
    by_hand = ("--token-budget", 128, "--accumulation", 3, "--validation-share", 0.1)  # the project's
    assert report == json.loads(dflash("inspect-buckets", cache, "--json", *by_hand).out)
    assert dflash("train", project).code == 0
    plan = decode_plan((project.parent / "run" / "plans" / "epoch-000.parquet").read_bytes())
    assert report["num_micro_batches"] == plan.num_micro_batches
    other = json.loads(dflash("inspect-buckets", cache, "--json", "--config", project, "--accumulation", 2).out)
    assert (other["num_micro_batches"], other["step_size"]) == (plan.num_micro_batches, 2)
