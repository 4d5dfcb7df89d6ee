"""Records out of whatever holds them: JSONL, JSON and parquet files, folders and globs of these, data sets of the Hub.

    talk.jsonl, talk.ndjson        one JSON object a line; so is a file of any other ending
    talk.json                      one list of objects, one object, or lines all the same
    talk.parquet                   one record a row; null columns and null fields of structs count as absent
    folder/, data/**/*.parquet     all such files in it (at any depth, hidden ones aside), in the order of their names
    hub:owner/name[/subset][:split]    a data set as the package `datasets` loads it

Every record has a source, which says where it stands and is its own: "file:line", "file:row" counted from 1, or
"file:line (record n)" within one JSON list. JSONL and parquet are read piece by piece; a JSON list is held whole.
"""

import glob
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_cache.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

HUB = "hub:"
ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet")
ADVICE = f"name JSONL, JSON or parquet files that exist, a folder of such, or {HUB}owner/name"
_BATCH_ROWS = 256
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class UnusableError(Exception):
    """Why one record cannot be used: the reason it is counted under, and a detail that a person may want."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)


Found = tuple[str, dict[str, Any] | UnusableError]  # a record's source, and itself or why there is none


def read_records(paths: Sequence[str]) -> Iterator[Found]:
    """Every record of every path, in order. Raises DataError if a path names nothing that can be read."""
    for path in paths:
        if path.startswith(HUB):
            yield from _read_hub(path)
            continue
        for file in list_files(path):
            try:
                yield from _read_file(file)
            except OSError as error:
                raise DataError(f"{file} cannot be read ({error.strerror or error}): {ADVICE}.") from None


def list_files(path: str) -> list[str]:
    """The files that `path` names: itself, those in the folder, or those that the glob meets.

    Raises DataError where a folder or a glob holds none. A file that does not exist is met when it is read.
    """
    if Path(path).is_dir():
        found = [
            str(file)
            for file in sorted(Path(path).rglob("*"))
            if file.suffix in ENDINGS and file.is_file() and not _is_hidden(file.relative_to(path))
        ]
        if not found:
            raise DataError(f"The folder {path} holds no file that ends with {', '.join(ENDINGS)}: {ADVICE}.")
        return found
    if Path(path).exists() or not glob.has_magic(path):
        return [path]
    matches = sorted(glob.glob(path, recursive=True))  # noqa: PTH207 (a Path globs below a folder it must know first)
    met = [match for match in matches if not Path(match).is_dir()]
    if not met:
        raise DataError(f"No file is named as {path} asks: {ADVICE}.")
    return met


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_file(path: str) -> Iterator[Found]:
    ending = Path(path).suffix
    if ending == ".parquet":
        return _read_parquet(path)
    if ending == ".json" and not _holds_lines(path):
        return _read_json(path)
    return _read_lines(path)


def _holds_lines(path: str) -> bool:
    """Whether the first line with anything on it is an object by itself, and not the whole file."""
    with Path(path).open("rb") as file:
        for line in file:
            stripped = line.removeprefix(_BYTE_ORDER_MARK).strip()
            if stripped:  # a list, which may be the whole file in one line, is not parsed for this
                return stripped.startswith(b"{") and isinstance(_parse(stripped), dict)
    return True  # an empty file has no lines


def _read_lines(path: str) -> Iterator[Found]:
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parse(line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line)
            yield f"{path}:{number}", record


def _parse(line: bytes) -> dict[str, Any] | UnusableError:
    if not line.strip():
        return UnusableError("empty line")
    try:
        record = json.loads(line.rstrip().decode())
    except UnicodeDecodeError as error:
        return UnusableError("invalid UTF-8", f"byte {error.start + 1} of the line")
    except json.JSONDecodeError as error:
        return UnusableError("invalid JSON", f"{error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets nested too deep
        return UnusableError("invalid JSON", str(error))
    return _as_record(record)


def _as_record(value: object) -> dict[str, Any] | UnusableError:
    return value if isinstance(value, dict) else UnusableError("not a JSON object")


def _read_json(path: str) -> Iterator[Found]:
    """The items of a list, or one object; what follows a mistake in the file is one unusable record."""
    try:
        text = Path(path).read_bytes().removeprefix(_BYTE_ORDER_MARK).decode()
    except UnicodeDecodeError as error:
        yield f"{path}:1", UnusableError("invalid UTF-8", f"byte {error.start + 1} of the file")
        return
    begin = _skip(text, 0, "")
    is_list = text.startswith("[", begin)
    decoder = json.JSONDecoder()
    position, line, counted = begin + is_list, 1, 0
    for number in range(1, len(text) + 1):
        position = _skip(text, position, "")
        if is_list and number == 1 and text.startswith("]", position):
            return
        line, counted = line + text.count("\n", counted, position), position
        source = f"{path}:{line} (record {number})" if is_list else f"{path}:{line}"
        try:
            value, position = decoder.raw_decode(text, position)
            position = _skip(text, position, ",]" if is_list else "")
        except json.JSONDecodeError as error:
            yield source, UnusableError("invalid JSON", f"{error.msg} at line {error.lineno} column {error.colno}")
            return
        except (ValueError, RecursionError) as error:
            yield source, UnusableError("invalid JSON", str(error))
            return
        yield source, _as_record(value)
        if position >= len(text) or text[position - 1] == "]":
            return


def _skip(text: str, position: int, expected: str) -> int:
    """Where the next value begins: after white space, and after one of the `expected` characters if there are any."""
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    if not expected:
        return position
    if text[position : position + 1] not in tuple(expected):
        raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
    return position + 1


def _read_parquet(path: str) -> Iterator[Found]:
    try:
        with pq.ParquetFile(path) as file:
            row = 0
            for batch in file.iter_batches(_BATCH_ROWS):
                for value in batch.to_pylist():
                    row += 1
                    yield f"{path}:{row}", _without_nulls(value)
    except pa.ArrowException as error:
        told = str(error).splitlines()[0].rstrip(".")
        raise DataError(f"{path} cannot be read ({told}): restore it from a copy, or leave it out.") from None


def _without_nulls(value: Any) -> Any:
    """Columns give every struct all fields that any row has; those that a row lacks are null and say nothing."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _read_hub(path: str) -> Iterator[Found]:
    for row, value in enumerate(_load_hub(path), 1):
        yield f"{path}:{row}", _without_nulls(value)


def _load_hub(path: str) -> "Dataset":
    """One split: the one that is named, or `train`, or the only one. Raises DataError in one sentence."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{path} needs the package `datasets`: install it with `pip install 'dflash-cache[hub]'`, or name files."
        ) from None
    place, _, split = path.removeprefix(HUB).partition(":")
    parts = place.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise DataError(f"{path} names no data set: write {HUB}owner/name, {HUB}owner/name/subset, each with :split.")
    try:
        loaded: Dataset | DatasetDict = datasets.load_dataset(
            "/".join(parts[:2]), parts[2] if len(parts) == 3 else None, split=split or None
        )
    except Exception as error:  # the Hub, the network, pandas and pyarrow each raise their own
        told = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise DataError(
            f"{path} cannot be loaded ({told}): check the name, the subset, the split, the connection and the login."
        ) from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    names = [str(name) for name in loaded]
    chosen = "train" if "train" in names else names[0]
    if chosen != "train" and len(names) > 1:
        raise DataError(f"{path} has the splits {', '.join(names)}: name one, as {path}:{names[0]}.")
    return loaded[chosen]
