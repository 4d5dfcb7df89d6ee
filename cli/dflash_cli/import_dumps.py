"""`dflash import`: hidden states that a peer's tool dumped, as a cache."""

import json
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from dflash_cache.cache.adopt.source import AdoptObserver, Outline, Source
from dflash_cache.config.loading import load_config, validate_config
from dflash_cache.config.settings import Config
from dflash_cache.errors import ConfigError
from dflash_cli.console import WorkProgress, console, show_bytes
from dflash_cli.options import Strict


class Format(StrEnum):
    """The tools whose dumps are known."""

    VLLM = "vllm"
    SPECFORGE = "specforge"
    MODELOPT = "modelopt"
    DEEPSPEC = "deepspec"


class Numbering(StrEnum):
    """What a layer's number means: the decoder layer that put the state out, or the one that takes it in."""

    OUTPUT = "output"
    INPUT = "input"


_HELP = """Turn hidden states that another tool dumped into a cache; goes on where it was stopped.

\b
FORMAT     SOURCE holds
vllm       hs_<i>.safetensors (here or in hidden_states/) and the Arrow dataset of speculators' prepare_data.py
specforge  rows_<a>-<b>/data_<i>.ckpt or .ckpt.gz, of scripts/prepare_hidden_states.py
modelopt   <conversation_id>.pt, of Model Optimizer's compute_hidden_states_*.py (with --answer-only-loss)
deepspec   manifest.json, samples.idx and shard-<n>.bin, of scripts/data/prepare_target_cache.py

\b
Which layers a dump holds only DeepSpec's says itself. Elsewhere give --layer-ids, and for vllm and modelopt say
how the numbers count, for one too few or too many is a drafter that learns and is not accepted:
output  as here, decoder layers from 0: SpecForge's target_layer_ids, Model Optimizer's HF dumper's --aux-layers
input   one more: speculators' and vLLM's layer ids, and the --aux-layers that went to Model Optimizer's vLLM dumper

The dtype stays that of the dump. Every sample is checked against the target and named in CACHE/left_out.parquet
if it cannot be used; nothing pickled is ever run."""


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("import", help=_HELP)
    def import_dump(
        source: Annotated[Path, typer.Argument(help="The folder of the dump.")],
        cache: Annotated[str, typer.Argument(help="The folder of the cache to fill.")],
        format: Annotated[Format, typer.Option("--format", help="The tool that made the dump.")],
        target: Annotated[str | None, typer.Option(help="The target: a folder, or a name on the Hub.")] = None,
        revision: Annotated[str | None, typer.Option(help="The target's revision on the Hub.")] = None,
        layer_ids: Annotated[
            str | None, typer.Option("--layer-ids", metavar="1,9,17", help="The dumped layers, in the dump's order.")
        ] = None,
        numbering: Annotated[Numbering | None, typer.Option(help="How --layer-ids count.")] = None,
        dataset: Annotated[Path | None, typer.Option(help="vllm: the Arrow dataset, if it lies elsewhere.")] = None,
        config: Annotated[
            Path | None, typer.Option(help="A YAML configuration to take target, data and generate from.")
        ] = None,
        max_length: Annotated[int | None, typer.Option(help="Leave out longer samples (default: none).")] = None,
        num_buckets: Annotated[int | None, typer.Option(help="Buckets of lengths.")] = None,
        shard_bytes: Annotated[int | None, typer.Option(help="Bytes of a shard.")] = None,
        codec: Annotated[str | None, typer.Option(help="How states are stored: none, int8 or int4.")] = None,
        max_bad_share: Annotated[
            float, typer.Option(help="The largest share of samples that may be bad.", min=0, max=1)
        ] = 0.01,
        full_masks: Annotated[
            bool, typer.Option("--full-masks", help="Take loss masks that cover every token of every sample.")
        ] = False,
        strict: Strict = False,
    ) -> None:
        changes = {
            "cache_dir": cache,
            "target.model": target,
            "target.revision": revision,
            "data.max_length": max_length,
            "data.num_buckets": num_buckets,
            "data.strict": strict or None,
            "generate.shard_bytes": shard_bytes,
            "generate.codec": codec,
        }
        settings = make_config(source, config, {key: value for key, value in changes.items() if value is not None})
        given = read_layer_ids(format, layer_ids, numbering, settings)
        import_states(settings, Source(source, format.value, given, dataset, max_bad_share, full_masks))


def make_config(source: Path, config: Path | None, changes: dict[str, Any]) -> Config:
    """The configuration with the command's options in it, or one of these options alone. Raises ConfigError."""
    if config is not None:
        return load_config(config, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    if "target.model" not in changes:
        raise ConfigError("No target is named: give --target (its config, tokenizer and weights), or --config.")
    tree: dict[str, Any] = {"run_dir": f"{changes['cache_dir']}-run", "data": {"paths": [str(source)]}}
    for key, value in changes.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return validate_config(tree, "that the options make")


def read_layer_ids(
    format: Format, text: str | None, numbering: Numbering | None, config: Config
) -> tuple[int, ...] | None:
    """The option's layers in our numbers, else the configuration's (which are). Raises ConfigError if unclear."""
    if text is None:
        return config.target.layer_ids
    try:
        numbers = tuple(int(part) for part in text.replace(",", " ").split())
    except ValueError:
        numbers = ()
    if not numbers:
        raise ConfigError(f"--layer-ids {text!r} is no list of whole numbers: write it like 1,9,17.")
    if numbering is None and format in (Format.VLLM, Format.MODELOPT):
        raise ConfigError(
            "--layer-ids need --numbering here: output if a number is the decoder layer, from 0, whose output the "
            "state is (Model Optimizer's HF dumper), input if it is one more (speculators, vLLM, Model Optimizer's "
            "vLLM dumper)."
        )
    return tuple(number - (numbering is Numbering.INPUT) for number in numbers)


def import_states(config: Config, source: Source) -> None:
    """Fill the cache, showing what happens."""
    from dflash_cache.cache.layout import write_config
    from dflash_cache.target.adopt import adopt

    with ImportConsole() as shown:
        manifest = adopt(config, source, shown)
    write_config(config)
    console.print(f"The cache {config.cache_dir} is complete: {manifest.num_samples:,} samples.")


class ImportConsole(AdoptObserver):
    """Shows an import on the console."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._progress: WorkProgress | None = None
        self._token_bytes = 0
        self._copied: tuple[int, float] = (0, 0.0)  # tokens before this run, seconds of it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def skipped(self, reasons: dict[str, int], first: dict[str, str]) -> None:
        """One line a reason."""
        for reason, count in reasons.items():
            console.print(f"Left out {count:,} (first: {first.get(reason, '?')}): {reason}.")

    def scanning(self, done: int, total: int) -> None:
        """Samples looked at."""
        self._show("Looking through the dump", done, total, "samples")

    def planned(self, outline: Outline) -> None:
        """The size, and the layers in words."""
        self._token_bytes = outline.token_bytes
        console.print(
            f"{outline.num_samples:,} samples, {outline.num_tokens:,} tokens of {outline.token_bytes:,} bytes "
            f"({outline.dtype}): {show_bytes(outline.num_tokens * outline.token_bytes)} in {outline.num_shards:,} "
            f"shards. Layers {', '.join(map(str, outline.layer_ids))}: the outputs of these decoder layers, counted "
            "from 0."
        )

    def copying(self, done_tokens: int, total_tokens: int) -> None:
        """Tokens copied, and bytes a second."""
        begin, seconds = self._copied
        if not seconds:
            begin = done_tokens
        rate = (done_tokens - begin) * self._token_bytes / seconds if seconds else 0.0
        seconds = self._show("Copying states", done_tokens, total_tokens, "tokens", f"({show_bytes(rate)}/s)")
        self._copied = begin, seconds

    def _show(self, title: str, done: int, total: int, unit: str, note: str = "") -> float:
        if self._progress is None or self._progress.title != title:
            self._stack.close()
            self._progress = self._stack.enter_context(WorkProgress(title, total, unit))
        return self._progress.update(done, note)
