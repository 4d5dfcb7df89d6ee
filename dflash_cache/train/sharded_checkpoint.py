"""Saving the checkpoint of sharded ranks: each writes its part aside, the first names the folder when all have."""

from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from dflash_cache.cache.files import explain_write_errors, flush_folder, make_folder
from dflash_cache.errors import RunError
from dflash_cache.train.checkpoint import Checkpoint, checkpoint_path, remove_old
from dflash_cache.train.checkpoint_folder import flatten, write_about
from dflash_cache.train.ranks import Ranks


def save_sharded(run_dir: Path, checkpoint: Checkpoint, keep: int, ranks: Ranks) -> None:
    """Called by all ranks: write it whole or not at all, then remove all but the last `keep` and the best.

    Raises RunError or WriteError.
    """
    path = checkpoint_path(run_dir, checkpoint.step, sharded=True)
    aside = path.with_name(f".{path.name}.partial")
    if ranks.is_first:
        with explain_write_errors(path):
            make_folder(aside)
    ranks.any(False)  # nobody writes before there is the folder
    try:
        with ranks.explain_losses():
            save(flatten(vars(checkpoint)), storage_writer=FileSystemWriter(aside))
    except CheckpointException as error:
        reason = "; ".join(sorted({str(each[0]) for each in error.failures.values()}))
        raise RunError(
            f"The checkpoint {path} could not be written ({reason}): make room or mend the storage, then start all "
            "ranks again; the run goes on from its last checkpoint."
        ) from None
    if not ranks.is_first:
        return
    with explain_write_errors(path):
        write_about(aside, vars(checkpoint))
        aside.replace(path)
        flush_folder(path.parent)
    remove_old(run_dir, keep, path)
