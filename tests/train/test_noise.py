import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train.rank_runs import COMPLETE, KILLED, Fate, final_state, read_log, run_ranks

from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import NoiseSettings
from dflash_cache.train.loop import inputs, steps, validate
from dflash_cache.train.noise import add_noise, noise_level
from dflash_cache.train.setup import open_run

GAUSSIAN, UNIFORM = NoiseSettings(kind="gaussian"), NoiseSettings(kind="uniform")


def levels(num_steps: int, **settings: object) -> list[float]:
    options = NoiseSettings.model_validate({"kind": "gaussian", "strength": 0.8, **settings})
    return [noise_level(step, num_steps, options) for step in range(num_steps)]


def test_the_level_starts_at_zero_rises_and_holds_as_worked_out_by_hand() -> None:
    found = levels(20, warmup_share=0.2)  # four steps of warm-up
    assert found[0] == 0.0
    assert found[1:5] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert found[10] == 0.8
    assert found[19] == 0.8


def test_the_level_decays_to_exactly_zero_at_the_last_step() -> None:
    found = levels(13, warmup_share=4 / 13, after_warmup="decay")
    assert found[0] == 0.0
    assert found[4] == 0.8
    assert found[8] == pytest.approx(0.4)
    assert found[12] == 0.0


@given(
    num_steps=st.integers(1, 200),
    share=st.floats(0, 1, exclude_min=True),
    after=st.sampled_from(["hold", "decay"]),
    strength=st.floats(0, 10),
)
def test_a_warm_up_however_short_starts_at_zero_and_the_level_stays_in_its_range(
    num_steps, share, after, strength
) -> None:
    found = levels(num_steps, warmup_share=share, after_warmup=after, strength=strength)
    assert found[0] == 0.0
    assert all(0 <= level <= strength for level in found)
    if after == "decay":
        assert found[-1] == 0.0 or round(share * num_steps) >= num_steps


def test_without_a_warm_up_or_a_kind_the_level_is_the_strength_or_nothing() -> None:
    assert levels(3, warmup_share=0) == [0.8] * 3
    assert levels(3, kind="off", warmup_share=0) == [0.0] * 3


@pytest.mark.parametrize("settings", [GAUSSIAN, UNIFORM])
def test_the_noise_has_mean_zero_the_levels_standard_deviation_and_its_kinds_kurtosis(settings) -> None:
    states = torch.linspace(-2, 2, 1_000_000).view(10, 100, 10, 100)
    noise = (add_noise(states, 0.05, settings, (0, 7, 0)) - states).double()
    assert float(noise.std()) == pytest.approx(0.05, rel=0.005)  # five standard errors are 0.0035
    assert abs(float(noise.mean())) < 5 * 0.05 / 1000
    kurtosis = float((noise**4).mean() / (noise**2).mean() ** 2)
    assert kurtosis == pytest.approx(3.0 if settings is GAUSSIAN else 1.8, rel=0.02)
    if settings is UNIFORM:
        assert float(noise.abs().max()) <= math.sqrt(3) * 0.05 + 1e-6


def test_in_bfloat16_the_noise_has_the_levels_standard_deviation_and_one_roundings_more() -> None:
    states = torch.full((1_000_000,), 4.0).bfloat16()  # steps of 1/32 above, 1/64 below
    noise = (add_noise(states, 0.1, GAUSSIAN, (0, 7, 0)).double() - 4.0).std()
    rounding = (1 / 32**2 + 1 / 64**2) / 2 / 12
    assert float(noise) == pytest.approx(math.sqrt(0.1**2 + rounding), rel=0.01)


def test_the_same_place_gives_the_same_bits_and_any_other_gives_others() -> None:
    states = torch.zeros(4, 5, 3, 8)
    first = add_noise(states, 0.1, GAUSSIAN, (3, 4, 5))
    torch.manual_seed(99)
    assert torch.equal(add_noise(states, 0.1, GAUSSIAN, (3, 4, 5)), first)
    others = [add_noise(states, 0.1, GAUSSIAN, seed) for seed in ((4, 4, 5), (3, 5, 5), (3, 4, 6), (3, 5, 4))]
    assert all(not torch.equal(other, first) for other in others)
    assert float(states.abs().max()) == 0.0  # the states themselves stay: they may be looked at again
    assert add_noise(states, 0.0, GAUSSIAN, (3, 4, 5)) is states


def test_a_bare_off_in_yaml_is_off(tmp_path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "cache_dir: c\nrun_dir: r\ntarget: {model: m}\ndata: {paths: [p]}\ntrain: {noise: {kind: off, strength: 1}}\n"
    )
    assert load_config(path).train.noise == NoiseSettings(strength=1.0)


def test_a_runs_states_have_the_schedules_noise_at_its_first_a_middle_and_its_last_step(configure) -> None:
    settings = {"kind": "gaussian", "strength": 0.5, "warmup_share": 0.3, "after_warmup": "decay"}
    config = configure("run", noise=settings)
    found = {}
    with open_run(config) as run:
        for part in steps(run):
            pairs = list(zip(inputs(run, part), part.micro_batches, strict=True))
            noise = torch.cat([(one.batch.hidden_STLH - two.batch.hidden_STLH).flatten() for one, two in pairs])
            found[run.step] = float(noise.std())
            again = [micro_batch.batch.hidden_STLH for micro_batch in inputs(run, part)]
            assert all(torch.equal(one.batch.hidden_STLH, two) for (one, _), two in zip(pairs, again, strict=True))
            run.step += 1
        last = run.num_steps - 1
        warmup = round(0.3 * run.num_steps)
    assert last > warmup + 3
    assert found[0] == 0.0
    assert found[last] == 0.0
    assert found[warmup] == pytest.approx(0.5, rel=0.02)
    middle = warmup + 2
    assert found[middle] == pytest.approx(0.5 * (last - middle) / (last - warmup), rel=0.02)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_noisy_run_killed_and_resumed_ends_with_the_same_bits_and_two_ranks_have_its_curve(configure) -> None:
    noise = {"kind": "uniform", "strength": 0.3, "warmup_share": 0.2}
    whole, parts, plain = configure("whole", noise=noise), configure("parts", noise=noise), configure("plain")
    two = configure("two", noise=noise, accumulation=2)
    for config, world_size in ((whole, 1), (plain, 1), (two, 2)):
        assert run_ranks([config] * world_size) == [(COMPLETE, "")] * world_size
    assert run_ranks([parts], Fate(rank=0, step=5)) == [(KILLED, "")]
    assert run_ranks([parts]) == [(COMPLETE, "")]
    (step, one), (other_step, other) = final_state(whole), final_state(parts)
    assert step == other_step
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    logs = [[record["loss"] for record in read_log(config)] for config in (whole, two, plain)]
    assert logs[0] == pytest.approx(logs[1], abs=1e-4)
    assert max(abs(a - b) for a, b in zip(logs[0], logs[2], strict=True)) > 1e-3
    assert [record["noise"] for record in read_log(whole) if record["kind"] == "train"][:2] == [0.0, 0.15]


def test_validation_reads_the_states_as_they_are(configure) -> None:
    losses = []
    for name, strength in (("noisy", 5.0), ("plain", 0.0)):
        noise = {"kind": "gaussian", "strength": strength, "warmup_share": 0}
        with open_run(configure(name, noise=noise)) as run:
            losses.append(validate(run)["loss"])
    assert losses[0] == losses[1]
