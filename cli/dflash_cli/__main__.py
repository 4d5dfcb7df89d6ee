"""`dflash`, or `python -m dflash_cli`: one command a file, errors in one sentence, exit code 2 for the user's."""

import os
import sys

import typer
from rich.text import Text

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

app = typer.Typer(
    help="Train DFlash drafters for speculative decoding from a cache of hidden states.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; a DFlashError ends as its sentence alone."""
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
    try:
        app()
    except DFlashError as error:
        errors.print(Text.assemble(("Error:", "red"), f" {error}"))
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("Stopped; what was committed is kept, and the same command goes on from there.")
        sys.exit(130)


if __name__ == "__main__":
    main()
