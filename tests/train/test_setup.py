import numpy as np
import pytest
import torch
from drafter.tiny_drafter import make_drafter
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from train.rank_runs import COMPLETE, KILLED, Fate, final_state, run_ranks

from dflash_cache.config.loading import validate_config
from dflash_cache.config.settings import TrainSettings
from dflash_cache.data.held_out import split_rows
from dflash_cache.errors import ConfigError
from dflash_cache.train.setup import make_optimizers, open_run


def options(**changes: object) -> TrainSettings:
    return TrainSettings.model_validate(changes)


@given(count=st.integers(1, 300), share=st.floats(0, 0.99), seed=st.integers(0, 2**40))
def test_the_two_parts_are_ascending_disjoint_and_together_complete(count: int, share: float, seed: int) -> None:
    num_held_out = max(round(share * count), 1 if share > 0 else 0)
    if num_held_out >= count:
        with pytest.raises(ConfigError):
            split_rows(np.arange(count), share, seed)
        return
    training, held_out = split_rows(np.arange(count), share, seed)
    assert len(held_out) == num_held_out
    for part in (training.tolist(), held_out.tolist()):
        assert part == sorted(set(part))
    assert sorted([*training.tolist(), *held_out.tolist()]) == list(range(count))


def test_the_same_seed_holds_out_the_same_rows_and_another_seed_others() -> None:
    held_out = [split_rows(np.arange(1000), 0.1, seed)[1].tolist() for seed in (0, 0, 1)]
    assert held_out[0] == held_out[1] != held_out[2]
    assert split_rows(np.arange(1000), 0.1, 0)[0].tolist() == sorted(set(range(1000)) - set(held_out[0]))


def test_every_row_is_held_out_equally_often() -> None:
    counts = np.zeros(50, dtype=int)
    for seed in range(2000):
        counts[split_rows(np.arange(50), 0.2, seed)[1]] += 1
    assert counts.sum() == 2000 * 10
    expected, deviation = 400, (2000 * 0.2 * 0.8) ** 0.5
    assert np.abs(counts - expected).max() < 5 * deviation


def test_a_share_of_nothing_holds_nothing_out_and_a_small_one_at_least_one() -> None:
    assert len(split_rows(np.arange(10), 0.0, 0)[1]) == 0
    assert len(split_rows(np.arange(10), 1e-6, 0)[1]) == 1


def test_a_share_that_leaves_nothing_to_train_on_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        split_rows(np.arange(3), 0.9, 0)
    assert str(caught.value) == (
        "train.validation_share 0.9 leaves no sample of 3 to train on; lower it, or cache more."
    )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_matrices_alone_decay_and_every_parameter_is_trained_once(kind: str) -> None:
    drafter = make_drafter()
    optimizers = make_optimizers(drafter, options(optimizer=kind, weight_decay=0.1))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    decays = {id(parameter): group["weight_decay"] for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(list(drafter.parameters()))
    for name, parameter in drafter.named_parameters():
        assert decays[id(parameter)] == (0.0 if "norm" in name else 0.1), name


def test_the_first_step_is_adamws_formula() -> None:
    drafter = make_drafter()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    (optimizer,) = make_optimizers(drafter, options(weight_decay=0.5, learning_rate=0.01, betas=[0.8, 0.9]))
    for parameter in drafter.parameters():
        parameter.grad = torch.full_like(parameter, -3.0)
    optimizer.step()
    for name, parameter in drafter.named_parameters():
        decay = 1.0 if "norm" in name else 1 - 0.01 * 0.5
        # the bias-corrected moments of a first step are g and g², so it moves by the rate against g's sign
        torch.testing.assert_close(parameter.detach(), before[name] * decay + 0.01, rtol=1e-5, atol=1e-6)


def test_muon_moves_matrices_by_a_fifth_of_the_rate_along_equal_singular_values_and_norms_like_adamw() -> None:
    drafter = make_drafter()
    before = {name: p.detach().clone() for name, p in drafter.named_parameters()}
    optimizers = make_optimizers(drafter, options(optimizer="muon", learning_rate=0.01))
    generator = torch.Generator().manual_seed(0)
    for parameter in drafter.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:  # singular values from 1 to 10, so that Muon's five iterations reach them all
            u, s, vh = torch.linalg.svd(parameter.grad, full_matrices=False)
            parameter.grad = u * torch.linspace(10, 1, len(s)) @ vh
    for optimizer in optimizers:
        optimizer.step()
    for name, parameter in drafter.named_parameters():
        moved = (parameter.detach() - before[name]) / 0.01
        if "norm" in name:
            torch.testing.assert_close(moved, -parameter.grad.sign(), rtol=1e-3, atol=1e-3)
            continue
        # U·Vᵀ of an m × n matrix has singular values 1 and entries of RMS 1/√max(m, n); scaled by 0.2·√max(m, n)
        singular = torch.linalg.svdvals(moved) / (0.2 * max(moved.shape) ** 0.5)
        assert float(singular.min()) > 0.6, name
        assert float(singular.max()) < 1.4, name
        assert float(moved.square().mean().sqrt()) == pytest.approx(0.2, rel=0.3), name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_optimizer_starts_at_the_learning_rate_and_adamw_has_the_betas(kind: str) -> None:
    settings = options(optimizer=kind, learning_rate=2e-3, betas=[0.7, 0.8])
    for optimizer in make_optimizers(make_drafter(), settings):
        for group in optimizer.param_groups:
            assert group["lr"] == 2e-3
            assert isinstance(optimizer, torch.optim.Muon) or tuple(group["betas"]) == (0.7, 0.8)


def test_muons_momentum_is_the_settings() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(16, 16, generator=generator) for _ in range(2)]
    moved = []
    for momentum in (0.0, 0.9):
        drafter = make_drafter()
        matrix = drafter.layers[0].mlp.gate_proj.weight
        muon, _ = make_optimizers(drafter, options(optimizer="muon", muon_momentum=momentum))
        for gradient in gradients:
            before = matrix.detach().clone()
            matrix.grad = gradient.new_zeros(matrix.shape)
            matrix.grad[:16] = gradient
            muon.step()
        moved.append(matrix.detach() - before)
    # without momentum the second step follows the second gradient alone; with it Nesterov's mix of both
    for momentum, step in zip((0.0, 0.9), moved, strict=True):
        average = (1 - momentum) * (momentum * gradients[0] + gradients[1])
        mix = (1 - momentum) * gradients[1] + momentum * average
        u, _, vh = torch.linalg.svd(mix)
        cosine = torch.nn.functional.cosine_similarity(-step[:16].flatten(), (u @ vh).flatten(), dim=0)
        assert float(cosine) > 0.95


@pytest.mark.parametrize("betas", [[0.9, 1.0], [1.0, 0.95], [-0.1, 0.9]])
def test_betas_that_never_forget_are_refused(betas: list[float]) -> None:
    with pytest.raises(ValidationError):
        options(betas=betas)


def test_a_bound_of_anchors_below_one_for_each_sample_is_refused() -> None:
    assert options(max_anchors=64, max_samples=64).max_anchors == 64
    with pytest.raises(ValidationError, match=r"max_anchors \(63\) must be at least max_samples \(64\)"):
        options(max_anchors=63, max_samples=64)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_muon_run_killed_and_resumed_ends_with_the_same_bits(configure) -> None:
    whole, parts = (configure(n, optimizer="muon", weight_decay=0.1, schedule="wsd") for n in ("whole", "parts"))
    assert run_ranks([whole]) == [(COMPLETE, "")]
    assert run_ranks([parts], Fate(rank=0, step=5)) == [(KILLED, "")]
    assert run_ranks([parts]) == [(COMPLETE, "")]
    (step, tensors), (other_step, others) = final_state(whole), final_state(parts)
    assert step == other_step
    assert any(name.endswith("momentum_buffer") for name in tensors)
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def test_a_run_that_starts_as_auto_chose_is_the_one_that_names_that_way(configure) -> None:
    named = configure("run")
    tree = named.model_dump(mode="json")
    tree["drafter"]["init"] = "auto"
    with open_run(named) as one, open_run(validate_config({**tree, "run_dir": f"{named.run_dir}-2"}, "test")) as other:
        assert one.identity == other.identity
        assert other.identity["init"] == "target-layers"
