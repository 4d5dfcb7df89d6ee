"""One data set in every container must read as the same conversations, and every mistake must say where it is."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_cache.data.conversations import read_conversations
from dflash_cache.data.inputs import UnusableError, list_files, read_records
from dflash_cache.errors import DataError

RECORDS = [
    {"messages": [{"role": "user", "content": "Hello é\u2028"}, {"role": "assistant", "content": "Hi."}], "id": 1},
    {"messages": [{"role": "user", "content": "Time?"}]},
    {
        "messages": [
            {"role": "user", "content": "Rain?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
                ],
            },
            {"role": "tool", "content": "dry", "tool_call_id": "c1"},
            {"role": "assistant", "content": "No.", "reasoning_content": "dry means no"},
        ],
        "tools": '[{"name": "look", "parameters": {}}]',
    },
]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS)


def write_container(folder: Path, name: str) -> Path:
    path = folder / name
    if name == "pretty.json":
        path.write_text(json.dumps(RECORDS, indent=2))
    elif name == "compact.json":
        path.write_text(json.dumps(RECORDS, ensure_ascii=False))
    elif name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist([{"tools": None} | record for record in RECORDS]), path, row_group_size=2)
    else:
        path.write_text(LINES)
    return path


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("a.jsonl", ["1", "2", "3"]),
        ("a.ndjson", ["1", "2", "3"]),
        ("lines.json", ["1", "2", "3"]),
        ("a.txt", ["1", "2", "3"]),
        ("compact.json", ["1 (record 1)", "1 (record 2)", "1 (record 3)"]),
        ("pretty.json", ["2 (record 1)", "15 (record 2)", "23 (record 3)"]),
        ("a.parquet", ["1", "2", "3"]),
    ],
)
def test_every_container_gives_the_same_conversations_and_says_where_each_stands(
    tmp_path: Path, name: str, places: list[str]
) -> None:
    (tmp_path / "plain.jsonl").write_text(LINES)
    plain = read_conversations([str(tmp_path / "plain.jsonl")], strict=True)
    path = write_container(tmp_path, name)
    result = read_conversations([str(path)], strict=True)
    assert [conversation.source for conversation in result.conversations] == [f"{path}:{place}" for place in places]
    assert [each.spell() for each in result.conversations] == [each.spell() for each in plain.conversations]
    assert (result.fingerprint, result.num_records, result.shapes) == (plain.fingerprint, 3, {"messages": 3})


def test_folders_and_globs_name_their_files_in_order_and_skip_what_is_hidden_or_no_data(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.parquet", "a/c.json", ".hidden/x.jsonl", "a/.x.jsonl", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list_files(str(tmp_path)) == [str(tmp_path / name) for name in ("a/c.json", "a/z.parquet", "b.jsonl")]
    assert list_files(str(tmp_path / "**" / "*.json*")) == [str(tmp_path / name) for name in ("a/c.json", "b.jsonl")]
    assert list_files(str(tmp_path / "?.jsonl")) == [str(tmp_path / "b.jsonl")]
    with pytest.raises(DataError, match=r"^No file is named as .*/\*\.csv asks: name JSONL, JSON or parquet files"):
        list_files(str(tmp_path / "*.csv"))


def test_a_file_whose_name_looks_like_a_glob_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_text(LINES)
    assert list_files(str(tmp_path / "a[1].jsonl")) == [str(tmp_path / "a[1].jsonl")]


@pytest.mark.parametrize(
    ("text", "places", "reason", "detail"),
    [
        ('[{"text": "a"}, {"text" "b"}]', ["1 (record 1)", "1 (record 2)"], "invalid JSON", "line 1 column 25"),
        ('[\n{"text": "a"}\n{"text": "b"}]', ["2 (record 1)"], "invalid JSON", "line 3 column 1"),
        ('[\n{"text": "a"},\n]', ["2 (record 1)", "3 (record 2)"], "invalid JSON", "line 3 column 1"),
        ('[{"text": "a"},\n 7]', ["1 (record 1)", "2 (record 2)"], "not a JSON object", ""),
        ('\n"text"', ["2"], "not a JSON object", ""),
        ('[{"text": "a"}', ["1 (record 1)"], "invalid JSON", "line 1 column 15"),
    ],
)
def test_a_mistake_in_a_json_file_is_one_record_with_its_line(
    tmp_path: Path, text: str, places: list[str], reason: str, detail: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    found = list(read_records([str(path)]))
    assert [source for source, _ in found] == [f"{path}:{place}" for place in places]
    last = found[-1][1]
    assert isinstance(last, UnusableError)
    assert last.args[0] == reason
    assert detail in last.args[1]


def test_empty_lists_hold_no_records_and_one_object_over_many_lines_is_one(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ("[]", " [ ]\n", ""):
        path.write_text(text)
        assert list(read_records([str(path)])) == []
    path.write_text(json.dumps(RECORDS[0], indent=1))
    assert list(read_records([str(path)])) == [(f"{path}:1", RECORDS[0])]


def test_a_damaged_parquet_file_is_told_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match=rf"^{path} cannot be read \(.*\): restore it from a copy, or leave it out\.$"):
        list(read_records([str(path)]))


def test_fields_that_a_column_fills_with_null_are_absent(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "g", "arguments": {"b": "x"}}}]
    pq.write_table(pa.table({"calls": [calls], "other": pa.nulls(1, pa.string())}), tmp_path / "a.parquet")
    assert list(read_records([str(tmp_path / "a.parquet")])) == [(f"{tmp_path}/a.parquet:1", {"calls": calls})]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`datasets` takes a folder of the name before it asks the Hub, so the package itself runs here, off line."""
    datasets = pytest.importorskip("datasets", reason="datasets is missing, an extra: `make test` installs it")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "talk").mkdir(parents=True)
    return tmp_path / "owner" / "talk"


def test_a_data_set_of_the_hub_reads_like_its_files(hub: Path) -> None:
    (hub / "train.jsonl").write_text(LINES)
    (hub / "test.jsonl").write_text(LINES.splitlines()[1] + "\n")
    plain = read_conversations([str(hub / "train.jsonl")], strict=True)
    for path in ("hub:owner/talk", "hub:owner/talk:train"):
        result = read_conversations([path], strict=True)
        assert [each.source for each in result.conversations] == [f"{path}:{row}" for row in (1, 2, 3)]
        assert result.fingerprint == plain.fingerprint
    assert len(read_conversations(["hub:owner/talk:test"], strict=True).conversations) == 1


def test_a_data_set_without_a_clear_split_or_name_is_refused_in_one_sentence(hub: Path) -> None:
    (hub / "test.jsonl").write_text(LINES)
    assert len(read_conversations(["hub:owner/talk"], strict=True).conversations) == 3  # the only split
    (hub / "validation.jsonl").write_text(LINES)
    for path, told in {
        "hub:owner/talk": r"hub:owner/talk has the splits .*: name one, as hub:owner/talk:\w+\.",
        "hub:owner/talk:dev": r"hub:owner/talk:dev cannot be loaded \(.*dev.*\): check the name, .*\.",
        "hub:talk": r"hub:talk names no data set: write hub:owner/name, hub:owner/name/subset, each with :split\.",
    }.items():
        with pytest.raises(DataError, match=rf"^{told}$"):
            list(read_records([path]))


def test_without_the_package_datasets_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # an import of it then fails as if it were not there
    with pytest.raises(DataError) as caught:
        list(read_records(["hub:owner/talk"]))
    assert str(caught.value) == (
        "hub:owner/talk needs the package `datasets`: install it with `pip install 'dflash-cache[hub]'`, or name files."
    )
