"""A whole step's objective on a real cache, against the formula over all logits of all its micro-batches at once."""

import pytest
import torch
import yaml
from train.rank_runs import COMPLETE, KILLED, Fate, final_state, read_log, run_ranks
from train.test_sweep import assert_same_runs, log_only, train_alone

from dflash_cache.cache.reader import CacheReader
from dflash_cache.config.loading import dump_config, validate_config
from dflash_cache.config.sweep import load_sweep
from dflash_cache.drafter.anchors import Blocks, make_blocks
from dflash_cache.drafter.objective import decay_gamma
from dflash_cache.errors import CacheError
from dflash_cache.target.generate import generate
from dflash_cache.target.load import load_target
from dflash_cache.target.observer import Observer
from dflash_cache.target.recheck import recheck
from dflash_cache.train.loop import inputs, steps, take_step, validate
from dflash_cache.train.setup import open_run
from dflash_cache.train.sweep import run_sweep

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def with_objective(config, **objective: object):
    tree = config.model_dump(mode="json")
    tree["objective"] |= objective
    return validate_config(tree, "test")


@pytest.fixture(scope="session")
def cache_with_last(base_config, tmp_path_factory):
    """The same cache with the target's last hidden states."""
    tree = base_config.model_dump(mode="json")
    tree["cache_dir"] = str(tmp_path_factory.mktemp("with-last") / "cache")
    tree["target"]["store_last_hidden"] = True
    config = validate_config(tree, "test")
    generate(config, Observer())
    return config


def with_last(config, cache_with_last, **objective: object):
    tree = with_objective(config, **objective).model_dump(mode="json")
    return validate_config(tree | {"cache_dir": cache_with_last.cache_dir}, "test")


def blocks_of(run, micro_batch) -> Blocks:
    batch = micro_batch.batch
    return make_blocks(batch.input_ids, batch.loss_mask, micro_batch.anchors_SA, run.drafter.shape.block_size)


def slow_objective(run, micro_batches, cap_lambda: float) -> torch.Tensor | None:
    """Weighted mean cross-entropy of the step's slots + λ · mean entropy of its right ones, from whole logits.

    None where fewer than four are right.
    """
    gamma = decay_gamma(run.drafter.shape.block_size)
    weighted, weights, entropies = [], [], []
    for micro_batch in micro_batches:
        blocks, batch = blocks_of(run, micro_batch), micro_batch.batch
        context = run.drafter.read_context(batch.hidden_STLH.float())
        out = run.drafter(run.frozen.embed_blocks(blocks.tokens_SA, run.drafter.shape), context, blocks.anchors_SA)
        logits_SAKV = out[:, :, 1:] @ run.frozen.head_VH.T
        for s, a, k in blocks.mask_SAK.nonzero().tolist():
            log_p, label = torch.log_softmax(logits_SAKV[s, a, k], 0), int(blocks.labels_SAK[s, a, k])
            weights.append(2.718281828459045 ** (-k / gamma))
            weighted.append(weights[-1] * -log_p[label])
            if int(log_p.argmax()) == label:
                entropies.append(-(log_p.exp() * log_p).sum())
    if len(entropies) < 4:
        return None
    return torch.stack(weighted).sum() / sum(weights) + cap_lambda * torch.stack(entropies).mean()


@pytest.mark.parametrize("cap_lambda", [0.0, 1.5])
def test_a_steps_loss_and_gradient_are_the_formulas_over_all_its_micro_batches(configure, cap_lambda) -> None:
    config = with_objective(configure("run", learning_rate=3e-2), cap_lambda=cap_lambda)
    with open_run(config) as run:
        for part in steps(run):
            expected = slow_objective(run, part.micro_batches, cap_lambda)
            if expected is not None:
                gradients = torch.autograd.grad(expected, list(run.drafter.parameters()))
                norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            record = take_step(run, part)
            run.step += 1
            if expected is not None:
                break
    assert expected is not None
    assert len(part.micro_batches) == 4
    assert record["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    assert record["gradient_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_one_and_two_ranks_add_the_same_entropy(configure) -> None:
    runs = [with_objective(configure(f"ranks-{n}", accumulation=4 // n), cap_lambda=1.0) for n in (1, 2)]
    plain = configure("plain")
    assert run_ranks([runs[0]]) == [(COMPLETE, "")]
    assert run_ranks([runs[1]] * 2) == [(COMPLETE, "")] * 2
    assert run_ranks([plain]) == [(COMPLETE, "")]
    one, two, without = ([record["loss"] for record in read_log(config)] for config in (*runs, plain))
    assert one == pytest.approx(two, abs=1e-4)
    assert max(abs(a - b) for a, b in zip(one, without, strict=True)) > 0.01


def slow_distillation(run, target, micro_batches, share: float) -> torch.Tensor:
    """Weighted mean of (1 − share) · cross-entropy + share · KL, with the logits of the target's own whole forward."""
    gamma = decay_gamma(run.drafter.shape.block_size)
    num_read = len(run.drafter.shape.target_layer_ids)
    weighted, weights = [], []
    for micro_batch in micro_batches:
        blocks, batch = blocks_of(run, micro_batch), micro_batch.batch
        context = run.drafter.read_context(batch.hidden_STLH[:, :, :num_read])
        out = run.drafter(run.frozen.embed_blocks(blocks.tokens_SA, run.drafter.shape), context, blocks.anchors_SA)
        logits_SAKV = out[:, :, 1:] @ run.frozen.head_VH.T
        with torch.no_grad():
            own_STV = target.model(input_ids=batch.input_ids).logits
        for s, a, k in blocks.mask_SAK.nonzero().tolist():
            log_p, label = torch.log_softmax(logits_SAKV[s, a, k], 0), int(blocks.labels_SAK[s, a, k])
            log_q = torch.log_softmax(own_STV[s, int(blocks.anchors_SA[s, a]) + k], 0)
            divergence = (log_q.exp() * (log_q - log_p)).sum()
            weights.append(2.718281828459045 ** (-k / gamma))
            weighted.append(weights[-1] * ((1 - share) * -log_p[label] + share * divergence))
    return torch.stack(weighted).sum() / sum(weights)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_a_distilled_steps_loss_and_gradient_are_the_formulas_with_the_targets_own_logits(
    configure, cache_with_last, share
) -> None:
    target = load_target(cache_with_last.target)
    with open_run(with_last(configure("run"), cache_with_last, distill=share)) as run:
        assert run.drafter.shape.target_layer_ids == (0, 2, 4)
        part = next(iter(steps(run)))
        expected = slow_distillation(run, target, part.micro_batches, share)
        gradients = torch.autograd.grad(expected, list(run.drafter.parameters()), allow_unused=True)
        norm = torch.cat([gradient.flatten() for gradient in gradients if gradient is not None]).norm()
        record = take_step(run, part)
    assert record["loss"] == pytest.approx(float(expected.detach()), rel=1e-4)
    assert record["gradient_norm"] == pytest.approx(float(norm), rel=1e-3)


def test_a_distilled_run_with_noise_and_entropy_resumes_to_the_bit_and_two_ranks_have_its_curve(
    configure, cache_with_last
) -> None:
    objective = {"distill": 0.5, "cap_lambda": 0.3, "weights": "dpace"}
    noise = {"kind": "gaussian", "strength": 0.2, "warmup_share": 0.2}
    whole, parts, two = (
        with_last(configure(name, noise=noise, accumulation=size), cache_with_last, **objective)
        for name, size in (("whole", 4), ("parts", 4), ("two", 2))
    )
    assert run_ranks([whole]) == [(COMPLETE, "")]
    assert run_ranks([parts], Fate(rank=0, step=5)) == [(KILLED, "")]
    assert run_ranks([parts]) == [(COMPLETE, "")]
    assert run_ranks([two] * 2) == [(COMPLETE, "")] * 2
    (step, one), (other_step, other) = final_state(whole), final_state(parts)
    assert step == other_step
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    curves = [[record["loss"] for record in read_log(config)] for config in (whole, two)]
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)


def test_without_distillation_the_last_states_change_nothing(configure, cache_with_last) -> None:
    plain, beside = configure("plain"), with_last(configure("beside"), cache_with_last)
    for config in (plain, beside):
        assert run_ranks([config]) == [(COMPLETE, "")]
    (_, one), (_, other) = final_state(plain), final_state(beside)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_validation_is_of_hard_labels_whatever_is_distilled(configure, cache_with_last) -> None:
    losses = []
    for share in (0.0, 1.0):
        with open_run(with_last(configure(f"run-{share}"), cache_with_last, distill=share)) as run:
            losses.append(validate(run)["loss"])
    assert losses[0] == losses[1]


def test_the_stored_last_states_are_the_targets_and_give_its_argmax(cache_with_last) -> None:
    target = load_target(cache_with_last.target)
    with CacheReader(cache_with_last.cache_dir) as reader:
        assert reader.manifest.layer_ids == (0, 2, 4, 5)
        assert reader.manifest.drafter_layer_ids == (0, 2, 4)
        found = recheck(reader, target, 5, 0, lambda done, total: None)
    assert found.is_right
    assert found.head_agreement == 1.0


def test_distilling_from_a_cache_without_last_states_is_refused(configure) -> None:
    config = with_objective(configure("run"), distill=0.5)
    with pytest.raises(CacheError) as caught, open_run(config):
        pass
    assert str(caught.value) == (
        f"objective.distill needs the target's last hidden state, which the cache at {config.cache_dir} does not hold: "
        "generate one with target.store_last_hidden, or set objective.distill to 0."
    )


def test_a_cache_whose_drafters_read_the_last_layer_anyway_distills_from_it(configure, tmp_path) -> None:
    tree = with_objective(configure("run"), distill=0.5).model_dump(mode="json")
    tree["target"] |= {"layer_ids": [2, 5], "store_last_hidden": True}
    config = validate_config(tree | {"cache_dir": str(tmp_path / "cache")}, "test")
    generate(config, Observer())
    target = load_target(config.target)
    with open_run(config) as run:
        assert run.reader.manifest.layer_ids == (2, 5) == run.drafter.shape.target_layer_ids
        part = next(iter(steps(run)))
        expected = float(slow_distillation(run, target, part.micro_batches, 0.5).detach())
        assert take_step(run, part)["loss"] == pytest.approx(expected, rel=1e-4)


def test_the_teacher_reads_the_states_without_the_noise(configure, cache_with_last) -> None:
    noise = {"kind": "gaussian", "strength": 1.0, "warmup_share": 0}
    with open_run(with_last(configure("run", noise=noise), cache_with_last, distill=0.5)) as run:
        part = next(iter(steps(run)))
        for noisy, stored in zip(inputs(run, part), part.micro_batches, strict=True):
            states_STLH = stored.batch.hidden_STLH
            assert torch.equal(noisy.last_STH, states_STLH[:, :, -1])
            assert float((noisy.batch.hidden_STLH - states_STLH[:, :, :-1]).std()) == pytest.approx(1.0, rel=0.05)


def test_drafters_that_share_their_reads_each_have_their_own_objective_and_noise(
    configure, cache_with_last, tmp_path
) -> None:
    (tmp_path / "base.yaml").write_text(dump_config(with_last(configure("base"), cache_with_last)))
    grid = {"objective.distill": [0.0, 0.5], "train.noise.kind": ["off", "uniform"]}
    tree = {"base": "base.yaml", "sweep_dir": str(tmp_path / "sweep"), "grid": grid, "mode": "together"}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    sweep = load_sweep(tmp_path / "sweep.yaml")
    run_sweep(sweep, log_only)
    assert_same_runs(sweep, train_alone(sweep, tmp_path))
    curves = {tuple(record["loss"] for record in read_log(run.config)) for run in sweep.runs}
    assert len(curves) == len(sweep.runs) == 4
