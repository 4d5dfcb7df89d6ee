"""From a family's checkpoint to an exported drafter, over the families of `architectures`: captured states, embedding,
logits, a training step and the export's bits, each against the model that transformers builds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from conftest import NUM_LAYERS, save_tokenizer
from target.architectures import EXPORTED, REFUSED
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from dflash_cache.config.settings import DrafterSettings, ObjectiveSettings, TargetSettings
from dflash_cache.drafter.anchors import make_blocks, pad_anchors
from dflash_cache.drafter.export import export_zlab, read_export
from dflash_cache.drafter.frozen import FrozenTarget, load_frozen
from dflash_cache.drafter.loss import block_loss
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.objective import weigh_slots
from dflash_cache.drafter.shape import DrafterShape, shape_from_target
from dflash_cache.drafter.teacher import load_teacher
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import TargetError
from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import Target, load_target

LAYER_IDS = (0, 2, 4)
LENGTHS = (19, 12, 1)
CPU = torch.device("cpu")


def save_model(config: PretrainedConfig, folder: Path) -> Path:
    auto_class = AutoModelForCausalLM
    if type(config) not in AutoModelForCausalLM._model_mapping:
        auto_class = AutoModelForImageTextToText
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto_class.from_config(config, dtype=torch.float32)
        if (bias := model.get_output_embeddings().bias) is not None:  # made of zeros, which nobody would miss
            torch.nn.init.normal_(bias)
        model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@dataclass(frozen=True)
class Built:
    """A family's target, loaded as ours, and the pieces that training reads from its files."""

    settings: TargetSettings
    target: Target
    files: TargetFiles
    shape: DrafterShape
    frozen: FrozenTarget


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    @cache
    def load(family: str) -> Built:
        folder = save_model(EXPORTED[family](), tmp_path_factory.mktemp(family))
        settings = TargetSettings(
            model=str(folder), dtype="float32", device="cpu", layer_ids=LAYER_IDS, store_last_hidden=True
        )
        target, files = load_target(settings), TargetFiles(settings)
        options = DrafterSettings(num_layers=2, block_size=4)
        shape = shape_from_target(files.load_config(), options, LAYER_IDS, 127)
        return Built(settings, target, files, shape, load_frozen(files, shape.embedding_scale, torch.float32, CPU))

    return load


@pytest.fixture(params=list(EXPORTED))
def built(request: pytest.FixtureRequest, build: Callable[[str], Built]) -> Built:
    return build(request.param)


def draw_ids() -> Tensor:
    return torch.randint(4, 120, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))


def captured(built: Built) -> Tensor:
    return capture_states(built.target, draw_ids(), torch.tensor(LENGTHS)).clone()


@torch.no_grad()
def own_states(target: Target, **inputs: Tensor) -> Tensor:
    """transformers' states (S, T, L, H) behind the captured layers but the last, which that tuple does not hold."""
    states = target.model(**inputs, output_hidden_states=True, use_cache=False).hidden_states
    assert len(states) == NUM_LAYERS + 1
    return torch.stack([states[k + 1] for k in LAYER_IDS], dim=2)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """To rounding: recurrent layers carry theirs on from token to token, and got to 1.7e-5 on one processor."""
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-5 * scale)


def test_states_of_a_padded_batch_are_those_of_each_sample_alone(built: Built) -> None:
    states_STLH = captured(built)
    for sample, length in enumerate(LENGTHS):
        expected = own_states(built.target, input_ids=draw_ids()[sample : sample + 1, :length])[0]
        assert_near(states_STLH[sample, :length, : len(LAYER_IDS)], expected)
        assert not states_STLH[sample, length:].any()


def test_states_are_those_of_a_batch_that_is_padded_on_the_left_with_a_mask(built: Built) -> None:
    """We pad on the right only: there causal layers need no mask. The other side gives valid tokens the same states."""
    ids_ST, T = torch.full((len(LENGTHS), max(LENGTHS)), 3), max(LENGTHS)
    for sample, length in enumerate(LENGTHS):
        ids_ST[sample, T - length :] = draw_ids()[sample, :length]
    mask_ST = torch.arange(T) >= T - torch.tensor(LENGTHS)[:, None]
    positions_ST = (mask_ST.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids_ST, "attention_mask": mask_ST.long(), "position_ids": positions_ST}
    expected_STLH = own_states(built.target, **inputs)
    states_STLH = captured(built)
    for sample, length in enumerate(LENGTHS):
        assert_near(states_STLH[sample, :length, : len(LAYER_IDS)], expected_STLH[sample, T - length :])


def test_embedding_and_logits_read_from_the_files_are_the_models_own(built: Built) -> None:
    ids_ST = draw_ids()[:1]
    seen: list[Tensor] = []
    hook = built.target.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        own = built.target.model(input_ids=ids_ST, use_cache=False).logits[0]
    hook.remove()
    embedded = built.frozen.embed(ids_ST)
    assert torch.equal(built.target.embed(ids_ST), embedded)
    assert torch.equal(built.target.embed_as_target(ids_ST), seen[0])
    norms_rows = built.target.config.model_type == "muse_glimmer_text"  # its own, and not its drafters'
    assert torch.equal(embedded, seen[0]) != norms_rows
    teacher, found = load_teacher(built.files, torch.float32, CPU), torch.empty_like(own)
    last_TH = captured(built)[0, :, -1]
    built.frozen.head.fill_logits(teacher.normalize(last_TH), found, found)
    assert_near(found, own)
    assert_near(built.target.read_logits(teacher.normalize(last_TH)), own)


def test_a_training_step_is_finite_and_its_export_keeps_every_bit(built: Built, tmp_path: Path) -> None:
    drafter = Drafter(built.shape)
    drafter.initialize(torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    mask_ST = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    anchors = pad_anchors([torch.tensor(row).numpy() for row in ([0, 7, 14], [3, 9])] + [torch.tensor([0]).numpy()])
    blocks = make_blocks(draw_ids(), mask_ST, anchors, built.shape.block_size)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
    slots = built.frozen.embed_blocks(blocks.tokens_SA, built.shape)
    context = drafter.read_context(captured(built)[:, :, : len(LAYER_IDS)])
    out = drafter(slots, context, blocks.anchors_SA)
    loss = block_loss(out, blocks, built.frozen.head, partial(weigh_slots, settings=ObjectiveSettings()))
    (loss.loss_sum / loss.weight_sum).backward()
    optimizer.step()
    assert bool(torch.isfinite(loss.loss_sum))
    assert float(loss.loss_sum.detach()) > 0
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert not torch.equal(parameter, before[name]), name

    export_zlab(drafter, tmp_path / "export", "float32")
    shape, tensors = read_export(tmp_path / "export")
    assert shape == built.shape
    assert tensors.keys() == drafter.state_dict().keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in drafter.state_dict().items())


@pytest.mark.parametrize("family", list(REFUSED))
def test_a_family_that_no_drafter_fits_is_refused_before_its_weights_are_read(family: str, tmp_path: Path) -> None:
    make, told = REFUSED[family]
    config = make()
    config.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # no tensors: to read one would fail
    with pytest.raises(TargetError) as caught:
        load_target(TargetSettings(model=str(tmp_path), dtype="float32", device="cpu", layer_ids=(0,)))
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_computes_more_around_its_layers_is_refused(tmp_path: Path, monkeypatch) -> None:
    folder = save_model(EXPORTED["granite"](), tmp_path / "granite")
    settings = TargetSettings(model=str(folder), dtype="float32", device="cpu", layer_ids=(0,))
    refusals = []
    for key in ("EMBEDDING_FACTORS", "LOGIT_FACTORS"):  # as if we did not know them
        with monkeypatch.context() as patch, pytest.raises(TargetError) as caught:
            patch.setattr(f"dflash_cache.drafter.family.{key}", {})
            load_target(settings)
        refusals.append(str(caught.value))
    assert refusals == [
        f"The target (granite) computes more around its layers than a drafter is trained with: {what}. This family is "
        "not supported yet."
        for what in ("what its first layer is given is not its embeddings", "its logits are not its head's")
    ]


def test_a_model_without_a_head_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """A whole checkpoint of a family whose model has no matrix for a head: nGPT-like scales a token's logit."""
    pytest.importorskip("transformers.models.dory", reason="Dory is missing: this transformers has no such family")
    import transformers  # only where the family exists

    config = transformers.DoryConfig(vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=6)
    config.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(TargetError, match=r"The target's head \(.* of DoryForCausalLM\) or embedding is no"):
        load_target(TargetSettings(model=str(tmp_path), dtype="float32", device="cpu", layer_ids=(0,)))
