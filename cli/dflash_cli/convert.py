"""`dflash convert`: a GGUF file, or the one inside an installed package, as an ordinary checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from dflash_cli.console import console


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def convert(
        source: Annotated[str, typer.Argument(help="A .gguf file, or an installed package that carries one.")],
        out: Annotated[Path, typer.Argument(help="The folder to make.")],
    ) -> None:
        """Make a target from GGUF weights: a bfloat16 safetensors checkpoint with its tokenizer."""
        convert_target(source, out)


def convert_target(source: str, out: Path) -> None:
    """Convert unless `out` is a checkpoint already."""
    from dflash_cache.target.gguf import bundled_gguf, convert_gguf

    if (out / "config.json").is_file():
        console.print(f"The target {out} is there already.")
        return
    path = Path(source)
    convert_gguf(path if path.suffix == ".gguf" else bundled_gguf(source), out)
    console.print(f"The target {out} is ready.")
    template = out / "chat_template.jinja"
    if not template.is_file():
        console.print(f"Its file holds no chat template (base models have none): write {template} to go on.")
