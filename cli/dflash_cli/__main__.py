"""`dflash`, or `python -m dflash_cli`: one command a file, errors in one sentence, exit code 2 for the user's."""

import os
import sys
from typing import Any

import typer
from rich.text import Text
from typer.core import TyperGroup

from dflash_cache.errors import DFlashError
from dflash_cli.console import errors

# Set before the libraries are imported: progress bars and advice of others would garble ours, and on Linux torch takes
# tensors of 2 MB and more on huge pages, with which a training step on a CPU needs 0.9 of the time.
for name, value in (
    ("TRANSFORMERS_VERBOSITY", "error"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "1"),
    ("TQDM_DISABLE", "1"),
    ("THP_MEM_ALLOC_ENABLE", "1"),
):
    os.environ.setdefault(name, value)

GO_ON = {"generate", "import", "train", "sweep", "demo"}  # with what they did before


class Commands(TyperGroup):
    """All commands; Ctrl-C ends one with a sentence, where typer would end it without a word."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if ctx.invoked_subcommand in GO_ON:
                errors.print("Stopped; what was committed is kept, and the same command goes on from there.")
            else:
                errors.print("Stopped.")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=Commands,
    help="Train DFlash drafters for speculative decoding from a cache of hidden states.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; a DFlashError ends as its sentence alone."""
    try:
        register_commands()
        app()
    except DFlashError as error:
        errors.print(Text.assemble(("Error:", "red"), f" {error}"))
        sys.exit(2)
    except KeyboardInterrupt:  # before the command began
        errors.print("Stopped.")
        sys.exit(130)


def register_commands() -> None:
    """Import each command's file, which takes a moment, and add it."""
    from dflash_cli import (
        convert,
        demo,
        estimate,
        evaluate,
        export,
        generate,
        import_dumps,
        inspect_buckets,
        inspect_data,
        sweep,
        train,
        verify,
    )  # fmt: skip

    commands = (
        convert,
        estimate,
        generate,
        import_dumps,
        inspect_buckets,
        inspect_data,
        verify,
        train,
        sweep,
        evaluate,
        export,
        demo,
    )
    for command in commands:
        command.register(app)


if __name__ == "__main__":
    main()
