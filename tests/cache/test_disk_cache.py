from pathlib import Path

import numpy as np
import pytest

from dflash_cache.cache.disk_cache import DiskCache


def arrays(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.integers(0, 256, 92, np.uint8), random.integers(0, 100, 5).astype("<i4")  # 112 bytes and a hash of 8


def is_kept(kept: DiskCache, seed: int) -> bool:
    """Whether the entry is there; if so, it must be right."""
    into = np.zeros(92, np.uint8), np.zeros(5, "<i4")
    if not kept.read(str(seed), into):
        return False
    assert all(np.array_equal(*pair) for pair in zip(into, arrays(seed), strict=True))
    return True


def held_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_was_unused_longest_goes_first_and_the_limit_holds(tmp_path: Path) -> None:
    kept = DiskCache(tmp_path, 3 * 120)
    for seed in range(3):
        kept.write(str(seed), arrays(seed))
    assert is_kept(kept, 0)
    kept.write("3", arrays(3))
    assert [is_kept(kept, seed) for seed in range(4)] == [True, False, True, True]
    assert held_bytes(tmp_path) == 3 * 120
    kept.write("3", arrays(3))
    assert held_bytes(tmp_path) == 3 * 120


def test_a_later_process_finds_what_was_kept_and_a_smaller_limit_shrinks_it(tmp_path: Path) -> None:
    kept = DiskCache(tmp_path, 1000)
    for seed in range(4):
        kept.write(str(seed), arrays(seed))
    assert [is_kept(DiskCache(tmp_path, 1000), seed) for seed in range(4)] == [True] * 4
    DiskCache(tmp_path, 250)
    assert held_bytes(tmp_path) == 240


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_entry_is_a_miss_and_is_written_anew(tmp_path: Path, damage: str) -> None:
    kept = DiskCache(tmp_path, 1000)
    kept.write("7", arrays(7))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] if damage == "cut" else whole[:50] + bytes([whole[50] ^ 1]) + whole[51:])
    assert not is_kept(kept, 7)
    kept.write("7", arrays(7))
    assert is_kept(kept, 7)


def test_an_entry_larger_than_the_limit_is_not_kept(tmp_path: Path) -> None:
    kept = DiskCache(tmp_path, 100)
    kept.write("1", arrays(1))
    assert not is_kept(kept, 1)
    assert held_bytes(tmp_path) == 0
