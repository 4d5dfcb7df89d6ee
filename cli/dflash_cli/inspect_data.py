"""`dflash inspect-data`: samples as text, with what is trained on told apart from the rest."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text

from dflash_cache.config.loading import load_config
from dflash_cache.config.settings import Config
from dflash_cli.console import console
from dflash_cli.options import ConfigFile, Overrides

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import pyarrow as pa


class Sample(NamedTuple):
    """Its place in the table of samples, where its conversation stands, ids (T) int32, and loss mask (T) bool."""

    number: int
    source: str
    input_ids: "np.ndarray"
    loss_mask: "np.ndarray"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("inspect-data")
    def inspect_data(
        config: ConfigFile,
        overrides: Overrides = None,
        first: Annotated[int, typer.Option(min=0, help="Number of the first sample to show.")] = 0,
        count: Annotated[int, typer.Option(min=1, help="How many to show.")] = 3,
    ) -> None:
        """Show samples as text: green is trained on. From the cache if it is begun, else from the data."""
        from dflash_cache.target.load import load_tokenizer

        settings = load_config(config, overrides or [])
        tokenizer = load_tokenizer(settings.target)
        for sample in read_samples_of(settings, first, count):
            console.print(
                show_sample(sample, lambda ids: str(tokenizer.decode(ids)), console.is_terminal), soft_wrap=True
            )
            console.print()


def read_samples_of(config: Config, first: int, count: int) -> Iterator[Sample]:
    """At most `count` samples from number `first` on. Raises DataError if there is no such sample."""
    from dflash_cache.cache.layout import manifest_path
    from dflash_cache.data.samples import sample_tokens
    from dflash_cache.errors import DataError
    from dflash_cache.target.prepare import read_preparation

    is_begun = manifest_path(Path(config.cache_dir)).exists()
    if is_begun:
        _show_reports(Path(config.cache_dir))
    table = read_preparation(config).samples if is_begun else _tokenize(config)
    if first >= table.num_rows:
        raise DataError(
            f"There is no sample {first}: {'the cache' if is_begun else 'the data'} has {table.num_rows:,}, counted "
            "from 0; give --first less."
        )
    for row in range(first, min(first + count, table.num_rows)):
        yield Sample(table["sample"][row].as_py(), table["source"][row].as_py(), *sample_tokens(table, row))


def _tokenize(config: Config) -> "pa.Table":
    """The samples that `generate` would make of the conversations that have their answers."""
    from dflash_cache.data.conversations import read_conversations
    from dflash_cache.target.prepare import build
    from dflash_cli.generate import GenerateConsole

    observer = GenerateConsole()
    read = read_conversations(config.data.paths, config.data.strict, config.data.drop_duplicates)
    observer.skipped(read.skipped, read.first_skipped)
    table, report = build(config, read, {}, observer)
    observer.reported(report)
    return table


def _show_reports(cache_dir: Path) -> None:
    """What `generate` told of the data that each part of the cache was made from."""
    from dflash_cache.target.data_report import read_reports
    from dflash_cli.generate import GenerateConsole

    observer = GenerateConsole()
    for report in read_reports(cache_dir):
        if report is not None:
            observer.skipped(report.left_out, report.first_left_out)
            for sentence in report.describe_samples():
                observer.noted(sentence)
            observer.reported(report)


def show_sample(sample: Sample, decode: "Callable[[np.ndarray], str]", in_colour: bool) -> Text:
    """Its text, special tokens included: supervised runs green, or between ⟦ and ⟧ where there is no colour."""
    import numpy as np

    ids, mask = sample.input_ids, sample.loss_mask
    text = Text(f"sample {sample.number} ({sample.source}): {len(ids):,} tokens, {mask.sum():,} trained on\n", "bold")
    bounds = [0, *(np.flatnonzero(mask[1:] != mask[:-1]) + 1).tolist(), len(ids)]
    for begin, end in pairwise(bounds):
        run = decode(ids[begin:end]).replace("\x1b", "␛")  # data must not steer the terminal
        if not mask[begin]:
            text.append(run, "not bold dim")
        else:
            text.append(run if in_colour else f"⟦{run}⟧", "not bold green")
    return text
