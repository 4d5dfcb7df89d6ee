import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_cache.cache.files import atomic_file, remove_leftovers, write_all, write_atomically
from dflash_cache.errors import CacheError

KILLED_BEFORE_THE_RENAME = """
import os, sys
from pathlib import Path
from dflash_cache.cache.files import write_atomically
os.replace = lambda *_: os._exit(9)
os.rename = os.replace
write_atomically(Path(sys.argv[1]), b"new")
"""


def test_a_written_file_holds_exactly_the_bytes_and_its_folder_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file.bin"
    write_atomically(path, b"one")
    write_atomically(path, b"another")
    assert path.read_bytes() == b"another"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_has_no_name_before_its_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    with atomic_file(path) as file:
        write_all(file, memoryview(b"data"))
        assert not path.exists()
    assert path.read_bytes() == b"data"


def test_an_exception_keeps_the_old_file_and_leaves_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    write_atomically(path, b"old")
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as file:
        write_all(file, memoryview(b"new"))
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_told_in_one_sentence() -> None:
    full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115  # closed below, outside what may raise
    with pytest.raises(CacheError) as caught, atomic_file(Path("/tmp/dflash-never-written")):
        write_all(full, memoryview(b"data"))
    full.close()
    assert str(caught.value) == (
        "/tmp/dflash-never-written could not be written (No space left on device); what was committed before is "
        "safe: make room or mend the storage, then run the same command again."
    )
    assert not Path("/tmp/dflash-never-written").exists()


def test_a_file_in_the_place_of_a_folder_is_a_cache_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CacheError, match="could not be written"):
        write_atomically(tmp_path / "file" / "below", b"data")


def test_a_process_killed_before_the_rename_leaves_the_old_file_and_a_removable_leftover(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.bin"
    write_atomically(path, b"old")
    done = subprocess.run([sys.executable, "-c", KILLED_BEFORE_THE_RENAME, str(path)], check=False, env=os.environ)
    assert done.returncode == 9
    assert path.read_bytes() == b"old"
    assert len(list(path.parent.iterdir())) == 2
    assert remove_leftovers(tmp_path) == 1
    assert list(path.parent.iterdir()) == [path]


def test_removing_leftovers_touches_nothing_else(tmp_path: Path) -> None:
    names = {"file.partial", ".hidden", "shard-000000.safetensors"}
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert remove_leftovers(tmp_path) == 0
    assert {path.name for path in tmp_path.iterdir()} == names
