"""`dflash export`: a checkpoint as a published drafter."""

from pathlib import Path
from typing import Annotated

import typer

from dflash_cache.config.loading import load_config
from dflash_cli.console import console
from dflash_cli.options import ConfigFile, OtherTarget, Overrides


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def export(
        config: ConfigFile,
        out: Annotated[Path, typer.Argument(help="The folder to make.")],
        overrides: Overrides = None,
        checkpoint: Annotated[
            Path | None, typer.Option(help="A checkpoint, or a run's folder; without it the run's best.")
        ] = None,
        dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
        form: Annotated[
            str, typer.Option("--format", help="zlab: for SGLang, vLLM and z-lab's package; speculators: for vLLM's.")
        ] = "zlab",
        other_target: OtherTarget = False,
    ) -> None:
        """Write config.json and model.safetensors as z-lab or vLLM's speculators publish DFlash drafters."""
        from dflash_cache.decode.fit import check_target
        from dflash_cache.drafter.export import DTYPES, export_zlab
        from dflash_cache.drafter.export_speculators import export_speculators
        from dflash_cache.drafter.shape import take_surroundings
        from dflash_cache.drafter.weights import TargetFiles
        from dflash_cache.errors import ConfigError
        from dflash_cli.evaluate import open_drafter

        known = next((name for name in DTYPES if name == dtype), None)
        if known is None:
            raise ConfigError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}.")
        if form not in ("zlab", "speculators"):
            raise ConfigError(f"--format {form} is not one of zlab, speculators.")
        settings = load_config(config, overrides or [])
        drafter = open_drafter(settings, checkpoint)
        check_target(drafter, settings.target, other_target)  # whose factors or whose name will be written
        drafter.shape = take_surroundings(drafter.shape, TargetFiles(settings.target).load_config())
        if form == "zlab":
            export_zlab(drafter, out, known)
        else:
            export_speculators(drafter, settings.target, out, known)
        console.print(f"The drafter {out} is ready.")
