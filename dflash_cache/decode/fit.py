"""Whether a drafter is of the target that it shall draft for: by its sizes, and by the record of its training."""

from transformers import PretrainedConfig

from dflash_cache.config.settings import TargetSettings
from dflash_cache.data.templates import tokenizer_fingerprint
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import find_contradictions, take_surroundings
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.errors import RunError
from dflash_cache.target.load import load_tokenizer


def check_target(drafter: Drafter, settings: TargetSettings, takes_other: bool = False) -> None:
    """Raise RunError unless the drafter fits the target and, where that is recorded, was trained for it.

    takes_other: whether another target of its sizes will do. The target's weights are not loaded.
    """
    files = TargetFiles(settings)
    fingerprint = files.fingerprint()
    check_fits(drafter, files.load_config(), fingerprint)
    trained_for = drafter.trained_for
    if trained_for is None or takes_other:
        return
    different = []
    if trained_for.weights_fingerprint != fingerprint:
        different.append("config or weights")
    if trained_for.tokenizer_fingerprint != tokenizer_fingerprint(load_tokenizer(settings)):
        different.append("tokenizer")
    if different:
        raise RunError(
            f"The drafter was trained for another target ({trained_for}) than {settings.model}, which has the same "
            f"sizes but another {' and another '.join(different)}: set target.model and target.revision to its own, or "
            "give --other-target."
        )


def check_fits(drafter: Drafter, config: PretrainedConfig, fingerprint: str) -> None:
    """Raise RunError unless the drafter has the hidden size, layers and vocabulary of a target, or is this one's own.

    Its own may have another vocabulary: `drafter.vocab_size`. A published one that names factors of embeddings or
    logits, or a cap, must name the target's: decoding applies the target's, and a server would apply the named ones.
    """
    shape, trained_for = drafter.shape, drafter.trained_for
    if trained_for is not None and trained_for.weights_fingerprint == fingerprint:
        return
    figures = {
        "hidden size": (shape.hidden_size, config.hidden_size),
        "layers": (shape.target_num_layers, config.num_hidden_layers),
        "vocabulary": (shape.vocab_size, config.vocab_size),
    }
    own = take_surroundings(shape, config)
    figures |= {name: (getattr(shape, name), getattr(own, name)) for name in find_contradictions(shape, own)}
    different = [f"{name} {was}, not {now}" for name, (was, now) in figures.items() if was != now]
    if different:
        raise RunError(
            f"The drafter was trained for another target ({'; '.join(different)}): set target.model to its target."
        )
