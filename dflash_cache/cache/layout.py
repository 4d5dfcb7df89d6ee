"""The cache's folder: where each thing lies, and the manifest that says what was cached and from what.

The manifest is written first and atomically, so a folder without one is not a cache. Reading refuses whatever this
version does not know (another format, a missing or unknown key), each in one sentence that says what to do.
"""

import io
import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dflash_cache.cache.files import write_atomically
from dflash_cache.cache.seal import BLANK_SEAL, check_seal, seal_bytes
from dflash_cache.cache.state_format import StateFormat
from dflash_cache.config.dtypes import Codec, Dtype
from dflash_cache.config.loading import dump_config
from dflash_cache.config.section import NonNegativeInt, PositiveInt
from dflash_cache.config.settings import Config
from dflash_cache.errors import CacheError

FORMAT_VERSION = 1
LAYER_CONVENTION = "output of decoder layer k, counted from 0, before any final norm"
DUMPED = "dumped by"  # begins the mask rule of a cache that was imported

_INFORMATION = {"tool_version", "settings"}  # kept to be read by people; they do not decide what the bits are

_OPTIONAL = ("last_hidden", "parts")  # absent where they say nothing: older caches and versions do not know them


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a cache holds and what it was made from; two caches with equal manifests hold the same bits."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    format_version: int = FORMAT_VERSION
    tool_version: str
    target_model: str
    target_revision: str | None
    target_fingerprint: str  # of the target's config and weights
    tokenizer_fingerprint: str
    template_fingerprint: str
    mask_rule: str
    layer_ids: tuple[NonNegativeInt, ...]
    layer_convention: str = LAYER_CONVENTION
    target_num_layers: PositiveInt
    hidden_size: PositiveInt
    vocab_size: PositiveInt
    dtype: Dtype
    codec: Codec = "raw"
    bucket_bounds: tuple[PositiveInt, ...]  # inclusive upper bounds, in tokens; the last is max_length
    max_length: PositiveInt
    data_fingerprint: str
    num_samples: NonNegativeInt
    order_seed: NonNegativeInt
    mask_token_candidates: tuple[NonNegativeInt, ...] = ()  # ids that no sample holds, the best first
    last_hidden: bool = False  # the last of layer_ids is there for distillation alone, no drafter reads it
    parts: tuple[str, ...] = ()  # data fingerprints of what was appended one after the other; absent: never appended
    settings: dict[str, Any] = field(default_factory=dict)  # the resolved configuration, for information

    @property
    def drafter_layer_ids(self) -> tuple[int, ...]:
        """The layers that drafters read, the first of those that are stored."""
        return self.layer_ids[:-1] if self.last_hidden else self.layer_ids

    @property
    def states(self) -> StateFormat:
        """How the hidden states lie in the shards, and how many bytes they take."""
        return StateFormat(len(self.layer_ids), self.hidden_size, self.dtype, self.codec)


def read_manifest(cache_dir: Path) -> Manifest:
    """The manifest of the cache at `cache_dir`.

    Raises CacheError if there is none, or if it is damaged or of a format that this version does not know.
    """
    path = manifest_path(cache_dir)
    try:
        data = path.read_bytes()
        tree = json.loads(data.decode())
    except (FileNotFoundError, NotADirectoryError):
        raise CacheError(f"There is no cache at {cache_dir}: run `dflash generate` first.") from None
    except OSError as error:
        raise CacheError(f"The manifest {path} cannot be read ({error.strerror}): mend its permissions.") from None
    except ValueError as error:  # broken UTF-8 too
        raise _damaged(path, f"is not valid JSON ({error})") from None
    if not isinstance(tree, dict):
        raise _damaged(path, "does not hold a JSON object")
    has_seal = tree.pop("seal", None) is not None  # there were caches before there were seals
    _refuse_other_format(cache_dir, tree)
    missing = [entry.name for entry in fields(Manifest) if entry.name not in {*tree, *_OPTIONAL}]
    if missing:
        raise _damaged(path, f"lacks {', '.join(missing)}")
    try:
        manifest = TypeAdapter(Manifest).validate_json(json.dumps(tree))
    except ValidationError as error:
        details = [f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors()]
        raise _damaged(path, f"has wrong entries ({'; '.join(details)})") from None
    if has_seal and check_seal(io.BytesIO(data)) != "whole":
        raise _damaged(path, "is not as it was written, a bit of it or a hand has changed")
    return manifest


def write_manifest(cache_dir: Path, manifest: Manifest) -> None:
    """Write the manifest atomically, making the folder if need be."""
    tree = asdict(manifest)
    for name in _OPTIONAL:
        if not tree[name]:
            del tree[name]
    text = json.dumps({**tree, "seal": BLANK_SEAL}, indent=2, ensure_ascii=False)
    write_atomically(manifest_path(cache_dir), seal_bytes(f"{text}\n".encode()))


def write_config(config: Config, cache_dir: Path | None = None) -> None:
    """Leave the full configuration that made the cache in its folder, sealed."""
    text = f"{dump_config(config)}# {BLANK_SEAL}\n"
    write_atomically((cache_dir or Path(config.cache_dir)) / "config.yaml", seal_bytes(text.encode()))


def difference(was: Manifest, now: Manifest) -> list[str]:
    """One "name: was X, is Y" for each entry that tells other bits; empty if both describe the same cache."""
    names = [entry.name for entry in fields(Manifest) if entry.name not in _INFORMATION]
    old, new = vars(was), vars(now)
    return [f"{name}: was {_show(old[name])}, is {_show(new[name])}" for name in names if old[name] != new[name]]


def is_remote(cache_dir: Path | str) -> bool:
    """Whether it is a URI: a cache in an object store."""
    return isinstance(cache_dir, str) and re.match(r"[a-z][a-z0-9+]*://", cache_dir) is not None


def place_of(cache_dir: Path | str) -> str:
    """The folder, or the URI without credentials and options: what may be shown and written down."""
    if not is_remote(cache_dir):
        return str(cache_dir)
    return re.sub(r"//[^/@]*@", "//", str(cache_dir).partition("?")[0]).rstrip("/")


def manifest_path(cache_dir: Path) -> Path:
    """What was cached and from what."""
    return cache_dir / "manifest.json"


def samples_dir(cache_dir: Path) -> Path:
    """Token ids, loss mask, source, bucket and length of every sample, in parquet."""
    return cache_dir / "samples"


def samples_path(cache_dir: Path, part: int = 0) -> Path:
    """The file of the samples that the cache began with (0), or of those that were appended then."""
    return samples_dir(cache_dir) / (f"samples_{part:06d}.parquet" if part else "samples.parquet")


def responses_dir(cache_dir: Path) -> Path:
    """The target's own answers to prompts that had none."""
    return cache_dir / "responses"


def jobs_path(cache_dir: Path) -> Path:
    """The linear job list."""
    return cache_dir / "jobs.parquet"


def data_report_path(cache_dir: Path) -> Path:
    """What became of the records that each part was made from."""
    return cache_dir / "data_report.json"


def index_dir(cache_dir: Path) -> Path:
    """One row a cached sample, in parquet."""
    return cache_dir / "index"


def bucket_dir(cache_dir: Path, bucket: int) -> Path:
    """The shards of one bucket."""
    return cache_dir / f"bucket-{bucket}"


def shard_path(cache_dir: Path, bucket: int, shard: int) -> Path:
    """One shard's file."""
    return cache_dir / shard_name(bucket, shard)


def shard_name(bucket: int, shard: int) -> str:
    """A shard's path relative to the cache, as the index names it."""
    return f"bucket-{bucket}/shard-{shard:06d}.safetensors"


def _refuse_other_format(cache_dir: Path, tree: dict[str, Any]) -> None:
    version = tree.get("format_version", FORMAT_VERSION)  # a missing key is reported with the other missing ones
    if version != FORMAT_VERSION:
        raise CacheError(
            f"The cache at {cache_dir} has format {version}, this version of dflash-cache reads format "
            f"{FORMAT_VERSION}: install the version that made it, or name another cache_dir and run `dflash generate`."
        )
    convention = tree.get("layer_convention", LAYER_CONVENTION)
    if convention != LAYER_CONVENTION:
        raise CacheError(
            f'The cache at {cache_dir} holds "{convention}", this version of dflash-cache reads "{LAYER_CONVENTION}": '
            "name another cache_dir and run `dflash generate`."
        )
    codec = tree.get("codec", "raw")
    if codec not in get_args(Codec):
        raise CacheError(
            f"The cache at {cache_dir} has the codec {codec}, this version of dflash-cache reads "
            f"{', '.join(get_args(Codec))}: install the version that made it, or name another cache_dir and run "
            "`dflash generate`."
        )


def _damaged(path: Path, what: str) -> CacheError:
    return CacheError(
        f"The manifest {path} {what}: restore it from a copy, or name another cache_dir and run `dflash generate`."
    )


def _show(value: object) -> str:
    if value is None or value == ():
        return "none"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def bucket_of_shard(name: str) -> int:
    """The bucket that a shard's name speaks of."""
    return int(name.partition("/")[0].removeprefix("bucket-"))
