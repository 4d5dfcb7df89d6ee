"""A whole step's objective on a real cache, against the formula over all logits of all its micro-batches at once."""

import pytest
import torch
from train.rank_runs import COMPLETE, read_log, run_ranks

from dflash_cache.config.loading import validate_config
from dflash_cache.drafter.objective import decay_gamma
from dflash_cache.train.loop import steps, take_step
from dflash_cache.train.setup import open_run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def with_objective(config, **objective: object):
    tree = config.model_dump(mode="json")
    tree["objective"] |= objective
    return validate_config(tree, "test")


def slow_objective(run, micro_batches, cap_lambda: float) -> torch.Tensor:
    """Weighted mean cross-entropy of the step's slots + λ · mean entropy of its right ones, from whole logits."""
    gamma = decay_gamma(run.drafter.shape.block_size)
    weighted, weights, entropies = [], [], []
    for micro_batch in micro_batches:
        blocks = micro_batch.blocks
        context = run.drafter.read_context(micro_batch.batch.hidden_STLH.float())
        out = run.drafter(run.frozen.embed_blocks(blocks.tokens_SA, run.drafter.shape), context, blocks.anchors_SA)
        logits_SAKV = out[:, :, 1:] @ run.frozen.head_VH.T
        for s, a, k in blocks.mask_SAK.nonzero().tolist():
            log_p, label = torch.log_softmax(logits_SAKV[s, a, k], 0), int(blocks.labels_SAK[s, a, k])
            weights.append(2.718281828459045 ** (-k / gamma))
            weighted.append(weights[-1] * -log_p[label])
            if int(log_p.argmax()) == label:
                entropies.append(-(log_p.exp() * log_p).sum())
    assert len(entropies) > 3
    return torch.stack(weighted).sum() / sum(weights) + cap_lambda * torch.stack(entropies).mean()


@pytest.mark.parametrize("cap_lambda", [0.0, 1.5])
def test_a_steps_loss_and_gradient_are_the_formulas_over_all_its_micro_batches(configure, cap_lambda) -> None:
    config = with_objective(configure("run", learning_rate=3e-2), cap_lambda=cap_lambda)
    with open_run(config) as run:
        for part in steps(run):
            expected = slow_objective(run, part.micro_batches, cap_lambda) if run.step == 3 else None
            if expected is not None:
                gradients = torch.autograd.grad(expected, list(run.drafter.parameters()))
                norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
            record = take_step(run, part)
            run.step += 1
            if expected is not None:
                break
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
