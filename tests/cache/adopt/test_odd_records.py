"""Records of other kinds than peers write: left out by name, whatever torch or arrow would say of them."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from cache.adopt.writers import Captured, write_modelopt, write_speculators
from safetensors.torch import load_file, save_file

from dflash_cache.cache.adopt.dump import Dump, Expected, SampleError, check_sample
from dflash_cache.cache.adopt.records import open_modelopt
from dflash_cache.cache.adopt.vllm import VllmDump
from dflash_cache.errors import DataError

LENGTH, WIDTH = 9, 8
EXPECTED = Expected(num_layers=2, hidden_size=WIDTH, vocab_size=100)


def make_sample() -> Captured:
    outputs = [torch.full((LENGTH, WIDTH), float(k + 1)) for k in range(3)]
    return Captured(torch.arange(40, 40 + LENGTH), torch.ones(LENGTH, dtype=torch.long), outputs, outputs[-1])


def check_first(dump: Dump) -> list[int]:
    """The first sample's ids, if it is one."""
    return check_sample(dump.names[0], dump.open_sample(dump.names[0]), EXPECTED).input_ids.tolist()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"aux_hidden_states": torch.ones(LENGTH, 2 * WIDTH).to_sparse()}, "of another kind than plain numbers"),
        ({"aux_hidden_states": torch.empty(LENGTH, 2 * WIDTH, device="meta")}, "of another kind than plain numbers"),
        ({"input_ids": torch.empty(LENGTH, dtype=torch.long, device="meta")}, "of another kind than plain numbers"),
        ({"input_ids": torch.ones(LENGTH, dtype=torch.bool)}, "token ids that are no list of whole numbers"),
        ({"aux_hidden_states": None, 7: torch.ones(3)}, "a record without input_ids or aux_hidden_states"),
    ],
)
def test_tensors_of_other_kinds_than_plain_numbers_are_refused_by_name(
    change: dict[Any, Any], reason: str, tmp_path: Path
) -> None:
    write_modelopt(tmp_path / "dump", [make_sample()], (0, 1))
    record = torch.load(tmp_path / "dump" / "chat-0.pt") | change
    torch.save({key: value for key, value in record.items() if value is not None}, tmp_path / "dump" / "chat-0.pt")
    with pytest.raises(SampleError, match=rf"chat-0\.pt .*{reason}"):
        check_first(open_modelopt(tmp_path / "dump"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64])
def test_ids_of_any_whole_dtype_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    write_modelopt(tmp_path / "dump", [make_sample()], (0, 1), input_ids=torch.arange(40, 40 + LENGTH).to(dtype))
    assert check_first(open_modelopt(tmp_path / "dump")) == list(range(40, 40 + LENGTH))


def test_a_file_in_the_format_of_old_torch_is_read(tmp_path: Path) -> None:
    write_modelopt(tmp_path / "dump", [make_sample()], (0, 1))
    path = tmp_path / "dump" / "chat-0.pt"
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    assert check_first(open_modelopt(tmp_path / "dump")) == list(range(40, 40 + LENGTH))
    states = open_modelopt(tmp_path / "dump").open_sample("chat-0.pt").load()
    assert torch.equal(states, torch.tensor([1.0] * WIDTH + [2.0] * WIDTH).expand(LENGTH, -1))


def test_a_lone_token_id_is_refused_by_name(tmp_path: Path) -> None:
    write_speculators(tmp_path, [make_sample()] * 2, (0, 1))
    path = tmp_path / "hidden_states" / "hs_0.safetensors"
    save_file(load_file(path) | {"token_ids": torch.tensor(40)}, path)
    with pytest.raises(SampleError, match=rf"other tokens than the dataset's.*1 in the file, {LENGTH} in row 0"):
        check_first(VllmDump(tmp_path, None))


@pytest.mark.parametrize("column", ["input_ids", "loss_mask"])
def test_a_dataset_of_words_is_refused(column: str, tmp_path: Path) -> None:
    write_speculators(tmp_path, [make_sample()] * 2, (0, 1))
    (tmp_path / "state.json").unlink()
    for old in tmp_path.glob("*.arrow"):
        old.unlink()
    words = pa.table({"input_ids": [[1]] * 2, "loss_mask": [[1]] * 2} | {column: [["a"]] * 2})
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, words.schema) as stream:
        stream.write_table(words)
    with pytest.raises(DataError, match=f"holds string as {column} where whole numbers should be"):
        VllmDump(tmp_path, None)
