"""What a server computes from an export, over the families: z-lab's own package gives our draft logits and, at
temperature 1, our distribution; speculators' format, which says less, takes those alone whose logits it gives."""

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import torch
from target.architectures import APPLIED, EMBEDDING_SCALE, EXPORTED, LOGIT_SCALE, REFUSED_BY_SPECULATORS, SOFTCAP
from target.test_architectures import LAYER_IDS, save_model
from torch import Tensor

from dflash_cache.config.settings import DrafterSettings, TargetSettings
from dflash_cache.drafter.export import export_zlab, read_export
from dflash_cache.drafter.export_speculators import export_speculators
from dflash_cache.drafter.frozen import load_frozen
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import RunError
from dflash_cache.target.load import Target, load_target

CLIENT = Path(sys.prefix) / "clients" / "zlab" / "dflash" / "model.py"
ANCHOR, LENGTH, BLOCK = 33, 9, 5


@dataclass(frozen=True)
class Exported:
    """A family's target, a random drafter for it, and the folder of its export."""

    settings: TargetSettings
    target: Target
    drafter: Drafter
    folder: Path


@pytest.fixture(scope="module")
def zlab() -> ModuleType:
    """The file of the package that holds its model, which needs nothing else of it."""
    found = importlib.util.spec_from_file_location("zlab_model", CLIENT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    @cache
    def make(family: str) -> Exported:
        folder = tmp_path_factory.mktemp(family)
        settings = TargetSettings(
            model=str(save_model(EXPORTED[family](), folder / "target")),
            dtype="float32",
            device="cpu",
            layer_ids=LAYER_IDS,
        )
        target = load_target(settings)
        wanted = DrafterSettings(num_layers=2, block_size=BLOCK)
        drafter = Drafter(shape_from_target(target.config, wanted, LAYER_IDS, 127)).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
        export_zlab(drafter, folder / "drafter", "float32")
        return Exported(settings, target, drafter, folder / "drafter")

    return make


@pytest.fixture(params=list(EXPORTED))
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def draw_states() -> Tensor:
    return torch.randn(1, LENGTH, len(LAYER_IDS), 32, generator=torch.Generator().manual_seed(2))


def block() -> Tensor:
    slots = torch.full((1, 1, BLOCK), 127)
    slots[..., 0] = ANCHOR
    return slots


@torch.inference_mode()
def draft_ours(each: Exported, embed: Callable[[Tensor], Tensor]) -> Tensor:
    """The drafter's normalised states (B, H), with embeddings made by training's code or decoding's."""
    context = each.drafter.read_context(draw_states())
    states: Tensor = each.drafter(embed(block()), context, torch.tensor([[LENGTH]]))[0, 0]
    return states


@torch.inference_mode()
def draft_theirs(zlab: ModuleType, each: Exported) -> tuple[Tensor, Tensor]:
    """z-lab's draft logits (B, V), computed as its `dflash_generate` does, and what the head alone gives."""
    model = zlab.DFlashDraftModel.from_pretrained(each.folder, dtype=torch.float32).eval()
    target, head = each.target.model, zlab._output_head(each.target.model)
    scale = float(zlab._draft_value(model.config, EMBEDDING_SCALE, 1.0))
    states = model(
        target_hidden=draw_states().flatten(-2),
        noise_embedding=zlab._raw_input_embeddings(target, block()[0], scale),
        position_ids=torch.arange(LENGTH + BLOCK)[None],
    )
    return model.compute_logits(states, head)[0], head(states)[0]


def distance(one: Tensor, other: Tensor) -> float:
    """The largest total variation between two rows' softmax."""
    return float((one.double().softmax(-1) - other.double().softmax(-1)).abs().sum(-1).max()) / 2


def test_zlabs_package_gives_our_logits_and_our_distribution_at_temperature_one(family, export, zlab) -> None:
    each = export(family)
    theirs, _ = draft_theirs(zlab, each)
    files = TargetFiles(each.settings)
    frozen = load_frozen(files, each.drafter.shape.embedding_scale, torch.float32, torch.device("cpu"))
    trained = torch.empty_like(theirs)
    frozen.head.fill_logits(draft_ours(each, frozen.embed), trained, trained)
    with torch.inference_mode():
        decoded = each.target.read_logits(draft_ours(each, each.target.embed))
    for ours in (trained, decoded):
        assert float((theirs - ours).abs().max()) <= 1e-5 * max(1.0, float(ours.abs().max()))
        assert distance(zlab._sampling_probs(theirs, 1.0).log(), ours) < 1e-5


def test_the_config_names_what_the_family_applies_and_reads_back(family, export, zlab) -> None:
    each = export(family)
    config = json.loads((each.folder / "config.json").read_text())
    named = {EMBEDDING_SCALE, LOGIT_SCALE, SOFTCAP}
    assert config["dflash_config"].keys() & named == APPLIED.get(family, set())
    assert not config.keys() & named
    assert read_export(each.folder)[0] == each.drafter.shape
    if APPLIED.get(family, set()) & {LOGIT_SCALE, SOFTCAP}:  # nobody could leave them out without being seen
        logits, bare = draft_theirs(zlab, each)
        assert distance(logits, bare) > 0.02


def test_speculators_format_is_written_only_for_targets_whose_embedding_and_head_are_matrices_that_it_finds(
    family, export, tmp_path
) -> None:
    each = export(family)
    if family not in REFUSED_BY_SPECULATORS:
        export_speculators(each.drafter, each.settings, tmp_path / "out", "float32")
        return
    with pytest.raises(RunError) as caught:
        export_speculators(each.drafter, each.settings, tmp_path / "out", "float32")
    assert REFUSED_BY_SPECULATORS[family] in str(caught.value)
    assert str(caught.value).endswith(": export it with --format zlab.")
    assert not (tmp_path / "out").exists()
