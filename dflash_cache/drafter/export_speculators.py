"""A drafter as vLLM's speculators library saves its DFlash models, so that it and `vllm serve FOLDER` load it.

The tensors are z-lab's; embedding and head are read from the target, which the config names. The library counts
captured layers from 1 (index of transformers' `hidden_states`) and takes the target's last layer for granted instead of
listing it. It reads one matrix for the embedding and one for the head, by their names, and applies no factor, cap or
bias. A drafter that needs more is refused. Keys and names: speculators 0.9.0, `model.py`, `utils/loading.py`,
`models/dflash/config.py`, `models/dflash/core.py` and `convert/dflash/converter.py`.

`sliding_window_non_causal` means sliding layers there, but vLLM takes its negation for all layers (pulls 47745, 56692):
it is written so that both are right, and a drafter with layers of both kinds, for which nothing is, is refused.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from dflash_cache.config.dtypes import Dtype
from dflash_cache.config.settings import TargetSettings
from dflash_cache.drafter.export import check_tensors, expected_tensors, write_export, zlab_config
from dflash_cache.drafter.family import logit_scale_of, softcap_of
from dflash_cache.drafter.frozen import find_names
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import DrafterShape
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import RunError

SPECULATORS_VERSION = "0.9.0"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # how the library's names of them end
# Keys of z-lab's config.json that are not the draft layers' own; speculators has others for them.
ZLAB_ONLY = ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers")


def export_speculators(drafter: Drafter, target: TargetSettings, out: Path, dtype: Dtype) -> None:
    """Write the drafter's folder `out`; nothing may stand there. Raises RunError or TargetError."""
    shape, files = drafter.shape, TargetFiles(target)
    if shape.target_layer_ids[-1] == shape.target_num_layers - 1:
        raise RunError(
            f"speculators' format cannot name the target's last layer ({shape.target_layer_ids[-1]}), which this "
            "drafter reads: export it with --format zlab."
        )
    if shape.embedding_scale != 1.0:
        raise RunError(
            f"speculators does not scale embeddings, and this drafter's target does (by {shape.embedding_scale:.6g}): "
            "export it with --format zlab."
        )
    _check_names(files)
    _check_head(files)
    if len(set(shape.layer_types)) > 1:
        raise RunError(
            "vLLM takes all layers of speculators' format for causal if one is, and this drafter has sliding layers "
            "beside full ones: export it with --format zlab, which it serves as well."
        )
    config = speculators_config(shape, dtype, _name_target(target), files.architectures)

    def read_back(folder: Path) -> dict[str, Tensor]:
        found = load_file(folder / "model.safetensors")
        check_tensors(found, expected_tensors(shape), folder)
        return found

    write_export(drafter, config, out, dtype, read_back)


def speculators_config(
    shape: DrafterShape, dtype: Dtype, target_name: str, target_architectures: list[str]
) -> dict[str, Any]:
    """config.json of a speculators DFlash model: the draft layers' config inside, the target's name beside it."""
    layers = {key: value for key, value in zlab_config(shape, dtype).items() if key not in ZLAB_ONLY}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": shape.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.target_layer_ids],
        "block_size": shape.block_size,
        "draft_vocab_size": shape.vocab_size,
        "dtype": dtype,
        "mask_token_id": shape.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": not shape.layer_types,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": target_architectures, "name_or_path": target_name},
        },
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    }


def _check_names(files: TargetFiles) -> None:
    """Raise RunError unless the library finds the target's embedding and head."""
    names = find_names(files)
    if not names.embedding.endswith(EMBEDDING) or (names.head != names.embedding and not names.head.endswith(HEAD)):
        raise RunError(
            f"speculators looks for a target's embedding and head under names that end in {EMBEDDING} and {HEAD}, and "
            f"this drafter's target has them as {names.embedding} and {names.head}: export it with --format zlab."
        )


def _check_head(files: TargetFiles) -> None:
    """Raise RunError unless the target's logits are its normalised states times a matrix, and nothing else."""
    config = files.load_config()
    scale, softcap, bias = logit_scale_of(config), softcap_of(config), find_names(files).bias
    more = {
        "adds a bias": bias is not None,
        f"multiplies by {scale:.6g}": scale != 1.0,
        f"caps at {softcap or 0:.6g}": softcap is not None,
    }
    if found := [name for name, is_so in more.items() if is_so]:
        raise RunError(
            "speculators takes a target's logits for its states times a matrix, and the head of this drafter's target "
            f"{' and '.join(found)}: export it with --format zlab."
        )


def _name_target(target: TargetSettings) -> str:
    """A name on the Hub as it is; a folder from the root, because whoever loads the drafter starts elsewhere."""
    folder = Path(target.model)
    return str(folder.resolve()) if folder.is_dir() else target.model
