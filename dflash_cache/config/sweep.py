"""A sweep's file: one base configuration, and what its runs change in it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from dflash_cache.config.loading import apply_overrides, describe_errors, read_yaml, set_value, validate_config
from dflash_cache.config.section import Settings
from dflash_cache.config.settings import Config
from dflash_cache.errors import ConfigError

SECTIONS = ("drafter", "objective", "train")  # all of a run that the cache does not decide
OWN = ("run_dir", "wandb.name")  # what each run is given, whatever the base says


class SweepSettings(Settings):
    """Many drafters over one cache: every combination of `grid` with every entry of `runs`."""

    base: str = Field(description="the configuration that the runs change, relative to the sweep's file")
    sweep_dir: str = Field(description="folder of the runs, each in a folder of its own, and of the table")
    mode: Literal["turns", "together", "devices"] = Field(
        "turns",
        description="one run after the other; together in one process, which reads each batch once for all runs of one "
        "order; or one run a device at a time",
    )
    devices: str = Field("all", description="for mode devices: all (GPUs), 0,1 (these GPUs), cpu:2")
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        {}, description="section.name: values; every combination is a run"
    )
    runs: list[dict[str, Any]] = Field([{}], min_length=1, description="section.name: value; each entry is a run")


@dataclass(frozen=True)
class SweepRun:
    """One run: its name, what it changes, and its whole configuration."""

    name: str
    changes: dict[str, Any]
    config: Config


@dataclass(frozen=True)
class Sweep:
    """The runs in the order of the file."""

    settings: SweepSettings
    runs: list[SweepRun]

    @property
    def folder(self) -> Path:
        """Where runs and table lie."""
        return Path(self.settings.sweep_dir)


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep's file and every run's configuration; `overrides` ("train.epochs=3") change the base.

    Raises ConfigError on a wrong file, on a change outside drafter, objective and train, on two runs of one name, and
    on an override of what the runs have from the sweep.
    """
    tree = read_yaml(path)
    try:
        settings = SweepSettings.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"The sweep {path} is wrong: {describe_errors(error, SweepSettings)}") from None
    base = path.parent / settings.base
    overridden = apply_overrides({}, overrides)
    if given := next((key for key in (*settings.grid, *chain(*settings.runs), *OWN) if _holds(overridden, key)), None):
        raise ConfigError(f"--set changes {given}, which the sweep {path} sets for its runs: leave it out.")
    runs = [
        _make_run(apply_overrides(read_yaml(base), overrides), settings, each, path) for each in _list_changes(settings)
    ]
    names = [run.name for run in runs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"The sweep {path} holds the run {twice} twice: leave one out.")
    return Sweep(settings, runs)


def shorten(keys: Sequence[str]) -> Sequence[str]:
    """The keys without their sections, unless two are then the same."""
    short = [key.rpartition(".")[2] for key in keys]
    return short if len(set(short)) == len(short) else keys


def _list_changes(settings: SweepSettings) -> list[dict[str, Any]]:
    combinations = [dict(zip(settings.grid, values, strict=True)) for values in product(*settings.grid.values())]
    return [{**entry, **combination} for entry in settings.runs for combination in combinations]


def _holds(tree: dict[str, Any], key: str) -> bool:
    """Whether plain values say something of `section.name`, or of a part of it."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, dict) or part not in node:
            return False
        node = node[part]
    return True


def _make_run(tree: dict[str, Any], settings: SweepSettings, changes: dict[str, Any], path: Path) -> SweepRun:
    for key, value in changes.items():
        if key.partition(".")[0] not in SECTIONS:
            raise ConfigError(
                f"The sweep {path} changes {key}: its runs share one cache, so only {', '.join(SECTIONS)} may differ."
            )
        set_value(tree, key, value, f"The sweep {path}")
    name = _name_run(changes)
    tree["run_dir"] = str(Path(settings.sweep_dir) / name)
    if isinstance(wandb := tree.get("wandb") or {}, dict):  # else it is refused below
        chosen = {key: value for key, value in wandb.items() if value is not None}
        tree["wandb"] = {"group": Path(settings.sweep_dir).name, **chosen, "name": name}
    return SweepRun(name, changes, validate_config(tree, f"{path.parent / settings.base} with {name}"))


def _name_run(changes: dict[str, Any]) -> str:
    """`learning_rate=0.001,weights=dpace`: what is told apart by folder, the same whatever else the sweep holds."""
    parts = (f"{name}={value}" for name, value in zip(shorten(list(changes)), changes.values(), strict=True))
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(parts)) or "base"
