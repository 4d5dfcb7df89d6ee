from pathlib import Path

import pytest
import torch
from train.rank_runs import COMPLETE, KILLED, Fate, read_log, run_ranks

from dflash_cache.config.settings import Config
from dflash_cache.train.checkpoint import Checkpoint, latest_path, load_checkpoint, load_drafter
from dflash_cache.train.loop import steps, take_step, validate
from dflash_cache.train.setup import open_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def saved(config: Config) -> Checkpoint:
    path = latest_path(Path(config.run_dir))
    assert path is not None
    return load_checkpoint(path)


def test_the_average_is_the_sum_of_all_steps_weights_each_decayed_by_what_came_after(configure) -> None:
    config = configure("run", ema_decay=0.25)
    with open_run(config) as run:
        weights = [{name: p.detach().double().clone() for name, p in run.drafter.named_parameters()}]
        for part in steps(run):
            take_step(run, part)
            run.step += 1
            weights.append({name: p.detach().double().clone() for name, p in run.drafter.named_parameters()})
            if run.step == 5:
                break
        found = run.average
    decays = [1 / 10, 2 / 11, 3 / 12, 0.25, 0.25]  # (1 + t) / (10 + t) until it passes 0.25
    shares = []
    for t in range(6):  # the start, and the weights after each step
        share = 1.0 if t == 0 else 1 - decays[t - 1]
        for later in decays[t:]:
            share *= later
        shares.append(share)
    assert sum(shares) == pytest.approx(1.0)
    assert found is not None
    for name, parameter in found.named_parameters():
        expected = sum(share * each[name] for share, each in zip(shares, weights, strict=True))
        torch.testing.assert_close(parameter.double(), expected, rtol=1e-5, atol=1e-6)
    assert float((found.fc.weight.double() - weights[-1]["fc.weight"]).abs().max()) > 1e-4


def test_a_run_with_an_average_killed_and_resumed_has_the_same_bits_in_both_on_two_ranks_the_same_curve(
    configure,
) -> None:
    whole, parts, plain = (configure(n, ema_decay=d) for n, d in (("whole", 0.9), ("parts", 0.9), ("plain", None)))
    two = configure("two", ema_decay=0.9, accumulation=2)
    for config, world_size in ((whole, 1), (plain, 1), (two, 2)):
        assert run_ranks([config] * world_size) == [(COMPLETE, "")] * world_size
    assert run_ranks([parts], Fate(rank=0, step=5)) == [(KILLED, "")]
    assert run_ranks([parts]) == [(COMPLETE, "")]
    one, other, without = saved(whole), saved(parts), saved(plain)
    assert one.average is not None
    assert other.average is not None
    assert without.average is None
    for name, tensor in one.drafter.items():
        assert torch.equal(tensor, other.drafter[name])
        assert torch.equal(one.average[name], other.average[name])
        assert torch.equal(tensor, without.drafter[name])  # training itself never reads the average
    assert any(not torch.equal(tensor, one.drafter[name]) for name, tensor in one.average.items())
    curves = [[record["loss"] for record in read_log(config)] for config in (whole, two)]
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)


def test_what_is_validated_and_loaded_is_the_average(configure) -> None:
    config = configure("run", ema_decay=0.9, max_steps=4)
    assert run_ranks([config]) == [(COMPLETE, "")]
    drafter, average = load_drafter(latest_path(Path(config.run_dir))), saved(config).average
    assert average is not None
    assert all(torch.equal(tensor, average[name]) for name, tensor in drafter.state_dict().items())
    last = read_log(config)[-1]
    assert last["kind"] == "validation"
    with open_run(configure("fresh")) as run:  # the average's weights, trained by nobody
        run.drafter.load_state_dict(average)
        assert validate(run)["loss"] == pytest.approx(last["loss"], rel=1e-6)
