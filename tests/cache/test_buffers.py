from concurrent.futures import ThreadPoolExecutor

import torch

from dflash_cache.cache.buffers import BufferPool


def test_memory_is_lent_again_when_the_last_view_is_gone_and_not_before() -> None:
    pool = BufferPool(max_idle=2)
    lent = pool.lend((3, 5), torch.float32)
    assert lent.shape == (3, 5)
    place = lent.data_ptr()
    assert place % 4096 == 0
    view = lent[1:].t()
    del lent
    assert pool.lend((3, 5), torch.float32).data_ptr() != place
    del view
    assert place in {tensor.data_ptr() for tensor in [pool.lend((1,), torch.uint8) for _ in range(2)]}


def test_memory_too_small_for_a_request_is_not_lent_for_it() -> None:
    pool = BufferPool(max_idle=4)
    pool.lend((10,), torch.uint8)
    large = pool.lend((5 << 20,), torch.uint8)
    large.fill_(7)
    assert int(large.sum(dtype=torch.int64)) == 7 * (5 << 20)


def test_tensors_lent_to_many_threads_at_once_never_share_memory() -> None:
    pool = BufferPool(max_idle=3)

    def fill(i: int) -> bool:
        lent = pool.lend((1 + i % 700, 64), torch.int64)
        lent.fill_(i)
        return bool((lent == i).all())

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(fill, range(2000)))
