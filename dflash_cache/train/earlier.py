"""An earlier drafter as the start of a new run: a checkpoint's, a run's, or one published in z-lab's format."""

from pathlib import Path

import torch
from xxhash import xxh3_64

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import SURROUNDINGS, find_contradictions
from dflash_cache.errors import ConfigError
from dflash_cache.train.checkpoint import differences, load_drafter

# no tensor has a size or a scale that depends on these; the block size may change, and a mask token be named anew
_MAY_DIFFER = ("block_size", "mask_token_id", "max_position_embeddings", "initializer_range")


def load_earlier(settings: DrafterSettings, run_dir: Path) -> Drafter | None:
    """The drafter of `drafter.init_from`, None if that is not set. Raises ConfigError or RunError.

    `run_dir` is the new run's: its own checkpoints change while it trains, so they are no start.
    """
    if settings.init_from is None:
        return None
    path = Path(settings.init_from)
    if path.resolve().is_relative_to(run_dir.resolve()):
        raise ConfigError(
            f"drafter.init_from is {path}, inside this run's own folder, which goes on by itself: name another run_dir."
        )
    return load_drafter(path)


def keep_mask_token(settings: DrafterSettings, earlier: Drafter | None) -> DrafterSettings:
    """The settings with the mask token that the earlier drafter was trained with, unless they name one."""
    if earlier is None or settings.mask_token_id is not None:
        return settings
    return settings.model_copy(update={"mask_token_id": earlier.shape.mask_token_id})


def start_from(drafter: Drafter, earlier: Drafter, path: str) -> None:
    """Copy the earlier drafter's weights, in float32. Raises ConfigError if it is of another shape or target."""
    free = {*_MAY_DIFFER, *SURROUNDINGS} - {*find_contradictions(earlier.shape, drafter.shape)}
    there, here = (
        {name: value for name, value in vars(each.shape).items() if name not in free} for each in (earlier, drafter)
    )
    if different := differences(there, here, "there", "here"):
        raise ConfigError(
            f"drafter.init_from: the drafter in {path} is another than the one to be trained ({different}): give the "
            "drafter's settings its values, and use a cache of its target and layers."
        )
    drafter.load_state_dict(earlier.state_dict())


def fingerprint(drafter: Drafter) -> str:
    """16 hex digits over names and values of all weights."""
    hasher = xxh3_64()
    for name, tensor in sorted(drafter.state_dict().items()):
        hasher.update(name.encode())
        hasher.update(tensor.contiguous().view(torch.uint8).numpy())
    return hasher.hexdigest()
