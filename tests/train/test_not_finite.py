"""Steps whose loss or gradient is not finite: from a sample with bad states, and from a rate that diverges."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from train.rank_runs import COMPLETE, KILLED, REFUSED, Fate, final_state, read_log, run_ranks

from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.loading import validate_config
from dflash_cache.config.settings import Config
from dflash_cache.data.plan import EpochPlan
from dflash_cache.train.loop import name_suspects, steps, take_step
from dflash_cache.train.setup import open_run, plan_training_epoch, split_rows
from dflash_cli.train import TrainConsole

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

STATES_BEGIN = 4096  # where a shard's states begin (DESIGN.md, "The cache, format 1")


@pytest.fixture
def poisoned(configure, tmp_path: Path):
    """Configurations on a copy of the cache whose first sample that is trained on has a NaN; and that sample."""
    original = configure("unused")
    cache_dir = tmp_path / "cache"
    shutil.copytree(original.cache_dir, cache_dir)
    with CacheReader(cache_dir) as reader:
        training, _ = split_rows(reader.index.sample, original.train.validation_share, original.train.seed)
        row = int(training[0])
        sample = int(reader.index.sample[row])
        shard = cache_dir / reader.index.shard_names[reader.index.shard[row]]
        token_bytes = len(reader.manifest.layer_ids) * reader.manifest.hidden_size * 4
        place = STATES_BEGIN + int(reader.index.row[row]) * token_bytes
    with shard.open("r+b") as file:
        file.seek(place)
        file.write(np.float32("nan").tobytes())

    def change(name: str, **settings: object) -> Config:
        tree = configure(name, verify_checksums=False, **settings).model_dump(mode="json")
        return validate_config(tree | {"cache_dir": str(cache_dir)}, "test")

    return change, sample


def samples_beside(plan: EpochPlan, reader: CacheReader, sample: int) -> list[int]:
    """All samples of the micro-batch that the sample is in."""
    rows = [plan.rows_of(place) for place in range(plan.num_micro_batches)]
    return next(found for each in rows if sample in (found := reader.index.sample[each].tolist()))


def test_a_bad_samples_steps_are_skipped_counted_and_name_its_micro_batch_and_the_run_goes_on(poisoned, capsys) -> None:
    change, sample = poisoned
    config = change("run")
    with open_run(config) as run:
        expected = []
        for epoch in range(2):
            names = samples_beside(
                plan_training_epoch(config, run.reader, run.training_rows, epoch), run.reader, sample
            )
            expected.append(", ".join(map(str, names[:8])) + (" …" if len(names) > 8 else ""))
    assert run_ranks([config]) == [(COMPLETE, "")]
    records = [record for record in read_log(config) if record["kind"] == "train"]
    skipped = [record for record in records if record["skipped"]]
    assert [record["epoch"] for record in skipped] == [0, 1]
    assert [record["suspects"] for record in skipped] == expected
    assert all(math.isfinite(record["loss"]) for record in records if not record["skipped"])
    assert [record["num_skipped"] for record in records] == np.cumsum([r["skipped"] for r in records]).tolist()
    assert all(torch.isfinite(tensor).all() for tensor in final_state(config)[1].values())
    shown = TrainConsole(log_every=10**6)
    for line in (Path(config.run_dir) / "log.jsonl").read_text().splitlines():
        shown(json.loads(line))
    printed = " ".join(capsys.readouterr().out.split())
    for count, record in enumerate(skipped, start=1):
        assert (
            f"step {record['step']}: loss or gradient is not finite with samples {record['suspects']}; the step is "
            f"skipped, {count} so far."
        ) in printed


def test_a_skipped_step_moves_no_weight_no_moment_and_no_average(poisoned) -> None:
    change, sample = poisoned
    with open_run(change("run", ema_decay=0.9)) as run:
        for part in steps(run):
            bad = any(sample in micro_batch.batch.sample for micro_batch in part.micro_batches)
            before = [tensor.clone() for tensor in _all_tensors(run)]
            record = take_step(run, part)
            run.step += 1
            assert record["skipped"] == bad
            moved = [not torch.equal(one, two) for one, two in zip(before, _all_tensors(run), strict=False)]
            assert any(moved) == (not bad)
            if bad:
                break
        assert bad
        assert run.step > 1


def _all_tensors(run) -> list[torch.Tensor]:
    moments = [
        value for each in run.optimizers for state in each.state_dict()["state"].values() for value in state.values()
    ]
    return [*run.drafter.state_dict().values(), *run.average.state_dict().values(), *moments]


@pytest.mark.parametrize("world_size", [1, 2])
def test_too_many_stop_the_run_on_every_rank_with_the_samples_named(poisoned, world_size) -> None:
    change, sample = poisoned
    config = change("run", max_skipped=1, accumulation=4 // world_size)
    found = run_ranks([config] * world_size)
    last = read_log(config)[-1]
    assert last["skipped"]
    assert str(sample) in last["suspects"].replace(" …", "").split(", ")
    expected = (
        "Too many steps in a row (1) had a loss or gradient that was not finite, up to step "
        f"{last['step']} with samples "
        f"{last['suspects']}: lower train.learning_rate, look at these samples, or raise train.max_skipped."
    )
    assert found == [(REFUSED, expected)] * world_size


def test_a_rate_that_diverges_stops_after_as_many_steps_as_are_set_even_if_killed_between(configure) -> None:
    whole, parts = (configure(name, learning_rate=1e30, max_skipped=4, clip_norm=1e9) for name in ("whole", "parts"))
    ((code, text),) = run_ranks([whole])
    assert code == REFUSED
    assert text.startswith("Too many steps in a row (4) had a loss or gradient that was not finite, up to step ")
    records = [record for record in read_log(whole) if record["kind"] == "train"]
    assert [record["skipped"] for record in records[-5:]] == [False, True, True, True, True]
    last = records[-1]["step"]
    assert run_ranks([parts], Fate(rank=0, step=last - 1)) == [(KILLED, "")]
    assert run_ranks([parts]) == [(REFUSED, text)]


def test_where_losses_are_finite_and_the_gradient_is_not_the_whole_steps_samples_are_named(configure) -> None:
    with open_run(configure("run")) as run:
        part = next(iter(steps(run)))
        names = [sample for each in part.micro_batches for sample in each.batch.sample.tolist()]
        one, bad = torch.tensor(1.0), torch.tensor(math.inf)
        shown = ", ".join(map(str, names[:8])) + (" …" if len(names) > 8 else "")
        size = len(part.micro_batches)
        assert name_suspects(run, part, [one] * size) == shown
        last = part.micro_batches[-1].batch.sample.tolist()
        assert size > 1
        assert name_suspects(run, part, [one] * (size - 1) + [bad]).split(", ")[0] == str(last[0])


def test_the_limit_may_be_raised_in_the_middle_of_a_run(poisoned) -> None:
    change, _ = poisoned
    ((code, _),) = run_ranks([change("run", max_skipped=1, checkpoint_every=1)])
    assert code == REFUSED
    assert run_ranks([change("run", max_skipped=2, checkpoint_every=1)]) == [(COMPLETE, "")]
