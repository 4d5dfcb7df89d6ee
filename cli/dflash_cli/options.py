"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML configuration.")]
Cache = Annotated[str, typer.Argument(metavar="CACHE", help="The cache's folder, or the URI of one in a store.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a setting, e.g. --set train.seed=3; may be repeated."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first malformed record instead of skipping it.")]
OtherTarget = Annotated[
    bool, typer.Option("--other-target", help="Take the drafter though it was trained for another target of its sizes.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
