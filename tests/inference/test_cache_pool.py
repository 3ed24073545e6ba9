"""Memory of caches that are gone. Shape letters: B rows, L positions of a pass, H heads, D head size."""

import weakref
from threading import Thread

import pytest
import torch

from nemo_dllm.collections.diffusion.inference.cache_pool import KEPT, ROWS, SLOTS, SPARE, CachePool, RecordedMemory
from nemo_dllm.collections.diffusion.sampling.joining import Picked


@pytest.fixture
def pool():
    # Nothing is recorded on a CPU; a name stands for what would be.
    return CachePool(None, torch.device("cpu"), most_bytes=1 << 20)


def used(cache, value=1.0, recorded=True, width=2, rows=None):
    """Write a value at the first position, and keep it."""
    rows = rows or len(cache.held_BS)
    window = cache.window(torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1, dtype=torch.bool))
    cache.write(0, window, torch.full((rows, 1, 1, width), value), torch.full((rows, 1, 1, width), -value))
    cache.hold(window)
    if recorded:
        cache.passes._graphs[("pass",)] = object()
    return cache


def test_the_next_cache_of_the_shape_gets_the_memory_empty(pool):
    first = used(pool.new_cache(2, 100))
    memory, passes = first.memory, first.passes
    del first
    second = pool.new_cache(2, SLOTS - 1)
    assert second.memory is memory and second.passes is passes and passes.names == ["pass"]
    assert not second.held_BS.any() and not any(part.any() for part in memory.layers[0])
    # It is one cache's at a time.
    assert pool.new_cache(2, 100).memory is not memory


def test_shorter_texts_get_memory_with_a_few_slots_to_spare(pool):
    memory = used(pool.new_cache(2, 700)).memory
    # Of all rows together.
    least = 6 * SLOTS - SPARE // 2
    assert pool.new_cache(2, least - 1 - SLOTS).memory is not memory
    cache = pool.new_cache(2, least - SLOTS)
    assert cache.memory is memory and cache.held_BS.shape == (2, 6 * SLOTS)
    del cache
    newer = used(pool.new_cache(2, 800)).memory
    assert pool.new_cache(2, 700).memory is newer
    many = used(pool.new_cache(16, 200), width=1).memory
    assert pool.new_cache(16, 100).memory is not many


@pytest.mark.parametrize(("rows", "positions"), [(1, 100), (2, SLOTS)])
def test_other_shapes_get_memory_of_their_own(pool, rows, positions):
    memory = used(pool.new_cache(2, 100)).memory
    other = pool.new_cache(rows, positions)
    assert other.memory is not memory and other.held_BS.shape[1] >= positions + 1
    assert pool.new_cache(2, 100).memory is memory


def test_memory_without_recorded_passes_is_kept_where_it_is_small(pool):
    """A prompt that joins a batch is one pass over its memory, which is recorded when it comes for the third time."""
    pool.new_cache(2, 100)
    used(pool.new_cache(2, 5 * SLOTS), recorded=False, width=32)
    assert not pool._idle
    kept = used(pool.new_cache(2, 4 * SLOTS - 1), recorded=False, width=16).memory
    assert pool.new_cache(2, 4 * SLOTS - 1).memory is kept


def test_rows_that_come_and_go_find_memory_that_was_left(pool):
    made = [len(pool.new_cache(rows, 5).held_BS) for rows in (1, 2, 3, 4, 5, 9, 16, 17, 32, 33, 128)]
    assert made == [1, 2, 4, 4, 8, 16, 16, 32, 32, 48, 128] and ROWS == 16
    first = used(pool.new_cache(5, 100), rows=5)
    memory = first.memory
    del first
    for rows in (8, 6, 7):
        cache = pool.new_cache(rows, 100)
        assert cache.memory is memory and not cache.held_BS.any()
        used(cache, rows=rows)
        del cache


def test_a_pass_over_fewer_rows_is_over_the_first(pool):
    cache = used(pool.new_cache(3, 5), 7.0, rows=3)
    assert cache.held_BS[:, 0].tolist() == [True, True, True, False]
    window = cache.window(torch.tensor([[2], [2]]), torch.tensor([[True], [False]]))
    keys_BSHD, values_BSHD = cache.write(0, window, torch.full((2, 1, 1, 2), 9.0), torch.full((2, 1, 1, 2), -9.0))
    assert keys_BSHD.shape[:2] == values_BSHD.shape[:2] == window.slot_ranks_BS.shape == (2, SLOTS)
    assert keys_BSHD[:, :3, 0, 0].tolist() == [[7, 0, 9], [7, 0, 0]]
    assert cache.memory.layers[0][0][2:, :3, 0, 0].tolist() == [[7, 0, 0], [0, 0, 0]]
    cache.hold(window)
    assert cache.held_BS[:, :3].sum(dim=1).tolist() == [2, 1, 1, 0]


def test_the_oldest_go_where_there_are_too_many(pool):
    for number in range(KEPT + 2):
        used(pool.new_cache(2, SLOTS * number + 5), width=1)
    assert [kept.memory.held_BS.size(1) // SLOTS for kept in pool._idle] == list(range(3, KEPT + 3))


def test_the_oldest_go_where_they_take_too_much(pool):
    row = SLOTS * 2 * 128 * 4
    assert pool._most_bytes == 8 * row
    for rows in (4, 2, 2, 16, 1):
        used(pool.new_cache(rows, 5), width=128)
    # 16 are more than the pool may keep, and push all others out.
    assert [len(kept.memory.held_BS) for kept in pool._idle] == [1]


def test_joined_rows_have_memory_of_the_pool(pool):
    narrow, wide = used(pool.new_cache(2, 5), 3.0), used(pool.new_cache(1, 200), 4.0)
    joined = type(narrow).join_rows([Picked(narrow, [1]), Picked(wide, [0])], 300)
    assert joined.held_BS.shape == (2, 3 * SLOTS) and joined.held_BS.sum(dim=1).tolist() == [1, 1]
    keys_BSHD, values_BSHD = joined.memory.layers[0]
    assert keys_BSHD[:, 0, 0, 0].tolist() == [3, 4] and values_BSHD[:, 0, 0, 0].tolist() == [-3, -4]
    assert not keys_BSHD[:, 1:].any()
    joined.passes._graphs[("joined",)] = object()
    memory = joined.memory
    del joined
    assert pool.new_cache(2, 299).memory is memory


def test_rows_join_in_free_places_of_memory_whose_passes_stay(pool):
    batch, newcomer = used(pool.new_cache(3, 500), 3.0, rows=3), used(pool.new_cache(1, 100), 4.0)
    memory, held = batch.memory, batch.held_BS
    where = [part.data_ptr() for part in memory.layers[0]]
    memory.layers[0][0][1] = float("nan")
    joined = type(batch).join_rows(
        [Picked(batch, [0]), Picked(newcomer, [0]), Picked(batch, [2]), Picked(newcomer, [0])], 300
    )
    assert joined is batch and joined.memory is memory and joined.held_BS is held and joined.passes.names == ["pass"]
    assert [part.data_ptr() for part in memory.layers[0]] == where
    keys_BSHD, values_BSHD = memory.layers[0]
    assert keys_BSHD[:, 0, 0, 0].tolist() == [3, 4, 3, 4] and values_BSHD[:, 0, 0, 0].tolist() == [-3, -4, -3, -4]
    assert not keys_BSHD[:, 1:].any() and held.sum(dim=1).tolist() == [1] * 4
    # For half as many slots it is given up, and for more than it has.
    for rows, positions in ([0], 500), ([0, 1, 2, 3, 3], 500), ([0, 1, 2], 600):
        moved = type(batch).join_rows([Picked(batch, rows)], positions)
        assert moved is not batch and moved.held_BS.sum(dim=1).tolist()[: len(rows)] == [1] * len(rows)


def test_memory_suits_what_needs_half_of_it(pool):
    cache = pool.new_cache(16, 3 * SLOTS)
    assert [cache.suits(rows, 3 * SLOTS) for rows in (4, 5, 16, 17)] == [False, True, True, False]
    assert [cache.suits(16, positions) for positions in (SLOTS - 1, SLOTS, 4 * SLOTS - 1, 4 * SLOTS)] == [
        *(False, True, True, False)
    ]


def test_memory_is_one_caches_whichever_thread_another_one_ends_on(pool, monkeypatch):
    """As where an error that is handed to another thread was the last to know of a cache."""
    first, second = (used(pool.new_cache(2, positions)) for positions in (5, 2000))
    memory, size = first.memory, RecordedMemory.size
    del first
    caches, threads = [], []

    def size_while_another_begins(kept):
        if not threads:
            threads.append(Thread(target=lambda: caches.append(pool.new_cache(2, 5))))
            threads[0].start()
            threads[0].join(timeout=0.2)
        return size.fget(kept)

    with monkeypatch.context() as patched:
        patched.setattr(RecordedMemory, "size", property(size_while_another_begins))
        del second
        threads[0].join()
    assert caches[0].memory is memory
    assert pool.new_cache(2, 5).memory is not memory


def test_a_cache_may_end_while_another_begins(pool, monkeypatch):
    """On the same thread, where garbage is collected: nobody waits, and no memory is given to two."""
    cache = used(pool.new_cache(2, 5))
    memory, size = cache.memory, RecordedMemory.size
    left = [used(pool.new_cache(2, 200)), used(pool.new_cache(2, 400))]

    def size_while_another_ends(kept):
        if left:
            left.pop()
        return size.fget(kept)

    with monkeypatch.context() as patched:
        patched.setattr(RecordedMemory, "size", property(size_while_another_ends))
        del cache
    assert not left and memory in [kept.memory for kept in pool._idle]


def test_nothing_is_left_when_the_pool_goes_first():
    pool = CachePool(None, torch.device("cpu"), most_bytes=1 << 20)
    cache = used(pool.new_cache(1, 5))
    kept = [weakref.ref(part) for part in (pool, cache.memory, cache.passes)]
    del pool
    assert all(part() is not None for part in kept)
    del cache
    # Not even until garbage is collected.
    assert all(part() is None for part in kept)


def test_memory_that_was_made_in_inference_mode_serves_outside_of_it(pool):
    with torch.inference_mode():
        memory = used(pool.new_cache(2, 100)).memory
    cache = used(pool.new_cache(2, 100), 3.0)
    assert cache.memory is memory
    with torch.inference_mode():
        used(cache, 4.0)
    assert cache.memory.layers[0][0][:, 0].unique().tolist() == [4.0]
