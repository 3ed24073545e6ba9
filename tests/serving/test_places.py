"""Rows of a batch with a cache keep their places, and others take those that are free."""

from collections import Counter

import pytest

from nemo_dllm.collections.diffusion.sampling import KVCache, SamplerConfig, generate
from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.rolling import Denoising, RollingBatch, alike
from nemo_dllm.collections.diffusion.serving.rows import Row

EXACT = {"cache": "exact", "block_size": 4, "block_origin": "sequence"}


def row_of(prompt=5, length=8, seed=1, deliver=lambda update: None, **fields):
    return Row([65] * prompt, [], length, SamplerConfig(**EXACT | fields), seed, 0, deliver)


class RoomyCache(KVCache):
    """Memory for a few rows more, as of a pool."""

    @staticmethod
    def shape(rows, positions):
        return -(-rows // 4) * 4, positions + 1


@pytest.fixture
def caches():
    """The memory of every cache of ``model``, in the order of their making."""
    return []


@pytest.fixture
def model(kit, tiny_attention, caches):
    class Noting(tiny_attention):
        def new_cache(self, rows, positions):
            return NotingCache(rows, positions)

    class NotingCache(KVCache):
        def __init__(self, rows, positions, device=None):
            super().__init__(rows, positions, device)
            caches.append(self.memory)

    return Noting(kit.VOCABULARY, 4)


@pytest.fixture
def batch_of(kit, model):
    return lambda *rows: RollingBatch(Denoising(model, kit.MASK, "cpu", str), rows)


def run_on(batch, until=lambda: False):
    """Steps until no row is live any more, or something has come about."""
    while not until() and (step := batch.step()) is not None:
        for row, settled_T in zip(batch.rows, step.settled_BT, strict=True):
            row.done |= int(settled_T.sum()) == row.hole_count
    return batch


def test_a_row_takes_the_place_of_one_that_has_ended_and_nothing_else_moves(model, batch_of, caches):
    first, short, last = row_of(seed=1), row_of(length=3, seed=2), row_of(length=12, seed=3)
    newcomer = row_of(8, seed=4)
    batch = run_on(batch_of(first, short, last), lambda: short.done)
    (memory,) = caches
    where = {layer: [part.data_ptr() for part in parts] for layer, parts in memory.layers.items()}
    assert batch.with_live_rows_of() is batch and batch.is_open
    before = {layer: [part.clone() for part in parts] for layer, parts in memory.layers.items()}
    # What is left of an ended row must not reach the next one.
    for parts in memory.layers.values():
        for part in parts:
            part[1] = float("nan")
    batch = batch.with_live_rows_of(batch_of(newcomer))
    assert batch.rows == [first, newcomer, last]
    for layer, parts in memory.layers.items():
        assert [part.data_ptr() for part in parts] == where[layer]
        for part, was in zip(parts, before[layer], strict=True):
            assert (part[[0, 2]] == was[[0, 2]]).all() and not part[1].any()
    model.passes.clear()
    batch.encode_prompts()
    # What is before its first hole's block, by itself.
    assert model.passes == [(1, 8)] and memory.held_BS.sum(dim=1).tolist() == [4, 8, 4]
    run_on(batch)
    assert all(row.done for row in batch.rows)
    # Those of newcomers are gone: no other is for three rows.
    assert [len(made.held_BS) for made in caches] == [3, 1, 1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_newcomers_take_free_places_first_and_then_those_behind(model, batch_of, count):
    model.new_cache = RoomyCache
    rows = [row_of(length=length, seed=length) for length in (3, 8, 3)]
    batch = run_on(batch_of(*rows), lambda: rows[0].done and rows[2].done)
    newcomers = [row_of(seed=seed) for seed in range(count)]
    expected = {1: [0, rows[1], rows[2]], 2: [0, rows[1], 1], 3: [0, rows[1], 1, 2]}[count]
    expected = [newcomers[row] if isinstance(row, int) else row for row in expected]
    assert batch.with_live_rows_of(batch_of(*newcomers)).rows == expected


def test_memory_is_given_up_where_half_of_it_would_do(batch_of, caches):
    rows = [row_of(length=length, seed=length) for length in (3, 3, 3, 11, 3)]
    batch = run_on(batch_of(*rows), lambda: rows[4].done)
    left = batch.with_live_rows_of()
    assert left.rows == [rows[3]] and [len(made.held_BS) for made in caches] == [5, 1]
    run_on(left)
    assert rows[3].done


def test_memory_is_given_up_for_a_longer_row_and_for_more_rows(batch_of, caches):
    first = row_of(length=24)
    batch = run_on(batch_of(first), lambda: first.passes == 3)
    for newcomer in (row_of(), row_of(40)):
        batch = batch.with_live_rows_of(batch_of(newcomer))
        batch.encode_prompts()
        batch.step()
        while not batch.is_open:
            batch.step()
    assert [tuple(made.held_BS.shape) for made in caches if len(made.held_BS) > 1] == [(2, 30), (3, 49)]


@pytest.mark.parametrize("given_up", [False, True])
def test_a_row_that_ends_within_a_block_does_not_keep_others_out(batch_of, given_up):
    """Given up by its client, or ended by a token that is found before the block is full."""
    gone, stays = row_of(length=12, seed=1), row_of(length=12, seed=2)
    batch = batch_of(gone, stays)
    batch.step()
    gone.abandoned = given_up
    gone.done = not given_up
    for _ in range(2):
        batch.step()
    assert batch.with_live_rows_of() is batch and batch.is_open
    newcomer = row_of(seed=3)
    batch = batch.with_live_rows_of(batch_of(newcomer))
    assert batch.rows == [newcomer, stays]
    batch.encode_prompts()
    passes = run_on(batch, lambda: newcomer.done).rows[0].passes
    # Turns are counted from those that go on: it waits once, for the fourth token of the other one's block.
    assert passes == 9


def test_passes_begin_before_the_last_step_is_handed_out_where_nobody_can_join(model, batch_of):
    batch = batch_of(row_of(4))
    begun = []
    for _ in range(8):
        batch.step()
        begun.append(len(model.passes))
    # After the last pass of a block the next one waits for those that may join.
    assert begun == [2, 3, 4, 4, 6, 7, 8, 8]


def test_a_batch_whose_rows_are_all_given_up_ends(batch_of):
    row = row_of(4)
    batch = batch_of(row)
    batch.step()
    row.abandoned = True
    # Of the pass that has begun.
    assert batch.step() is not None and not batch.is_open
    assert batch.step() is None and batch.is_open and batch.with_live_rows_of() is None


def test_a_row_whose_pass_has_begun_is_not_joined_when_the_one_it_waited_for_is_given_up(kit, model, batch_of):
    """The numbers that it has drawn for that pass would be lost."""
    gone, waits = row_of(4, 12, seed=1, temperature=1.0), row_of(7, 9, seed=2, temperature=1.0)
    batch = batch_of(gone, waits)
    batch.step()
    gone.abandoned = True
    batch.step()
    assert batch._run.progress.is_between_blocks and not batch.is_open
    tokens = []
    while not waits.done:
        step = batch.step()
        tokens = step.tokens_BT[1, waits.holes].tolist()
        waits.done = not step.holes_BT[1].any()
        if batch.is_open:
            batch = batch.with_live_rows_of(batch_of(row_of(seed=3, temperature=1.0))) or batch
    config = SamplerConfig(**EXACT, temperature=1.0, max_new_tokens=9)
    alone = generate(model, [[65] * 7], config, mask_token_id=kit.MASK, seeds=[2])
    assert tokens == alone.completions[0].tolist()


def test_rows_in_caches_that_only_join_are_moved_together(kit, tiny_attention):
    class Moving(KVCache):
        suits = property()

    model = tiny_attention(kit.VOCABULARY, 4)
    model.new_cache = Moving
    of = Denoising(model, kit.MASK, "cpu", str)
    rows = [row_of(length=length, seed=length) for length in (3, 8)]
    batch = run_on(RollingBatch(of, rows), lambda: rows[0].done)
    newcomer = row_of(seed=3)
    assert batch.with_live_rows_of(RollingBatch(of, [newcomer])).rows == [rows[1], newcomer]


def test_prompts_are_encoded_with_those_of_about_their_length():
    rows = dict(zip("abcdef", (30, 100, 20, 300, 90, 25), strict=True))

    def groups(full_pass):
        return ["".join(group) for group in alike(list(rows), list(rows.values()), full_pass)]

    assert groups(256) == ["d", "be", "afc"] and groups(None) == ["dbeafc"]
    assert groups(200) == ["d", "be", "afc"] and groups(199) == ["d", "b", "ea", "fc"] and groups(1) == list("dbeafc")
    assert alike([], [], 256) == []


@pytest.mark.parametrize("full_pass", [None, 16])
@pytest.mark.parametrize("cache", ["exact", "approximate_dual"])
def test_new_rows_are_encoded_together_or_apart(model, batch_of, cache, full_pass):
    model.full_pass = full_pass
    batch = batch_of(*[row_of(prompt, 4, seed=prompt, cache=cache) for prompt in (4, 16, 8, 4)])
    batch.encode_prompts()
    # One of a block is encoded with the next one.
    exact = {None: [], 16: [(1, 16), (2, 8)]}
    dual = {None: [], 16: [(1, 20), (1, 12), (2, 8)]}
    assert model.passes == (exact if cache == "exact" else dual)[full_pass]
    together = (4, 16) if cache == "exact" else (4, 20)
    batch.step()
    assert model.passes[-1] == (4, 4) and (together in model.passes) == (full_pass is None)
    assert ((4, 8) in model.passes) == (cache == "exact" and full_pass is not None)


def answer(kit, model, rows):
    """By an engine with room for two of them."""
    engine = BatchingEngine(
        model, mask_token_id=kit.MASK, device="cpu", decode=str, limits=ServerLimits(max_batch_rows=2)
    )
    engine.submit(rows)
    engine.start()
    try:
        kit.until(lambda: all(row.done for row in rows))
    finally:
        engine.close()


def test_a_server_encodes_prompts_once_and_lets_rows_in_where_others_end(kit, model, caches):
    made = [row_of(prompt, length, seed=seed) for seed, (prompt, length) in enumerate([(4, 4), (8, 20), *[(4, 4)] * 3])]
    answer(kit, model, made)
    # Two prompts together; five blocks of the long row, of which four are encoded with the next ones, as are the other
    # prompts. What waits takes the other place in time for all of them but the last.
    assert sorted(Counter(model.passes).items()) == [((2, 4), 5 * 4 - 4), ((2, 8), 1 + 4)]
    assert made[1].passes == 20 and [row.passes for row in made if row is not made[1]] == [4] * 4
    assert [len(memory.held_BS) for memory in caches].count(2) == 1


def test_a_prompt_that_breaks_the_model_leaves_rows_that_run_alone(kit, model):
    forward = model._forward

    def breaks(tokens_BL, *rest):
        if (tokens_BL == 90).any():
            raise RuntimeError("the model broke")
        return forward(tokens_BL, *rest)

    model._forward = breaks
    rows, updates = [], []
    for seed in range(6):
        updates.append([])
        row = row_of(6, 4 + 4 * (seed % 3), seed=seed, deliver=updates[-1].append)
        if seed == 3:
            row.prefix = [90] * 6
        rows.append(row)
    answer(kit, model, rows)
    assert [seed for seed, got in enumerate(updates) if got[-1].error] == [3]
    for seed in (0, 1, 2, 4, 5):
        config = SamplerConfig(**EXACT, max_new_tokens=rows[seed].hole_count)
        alone = generate(model, [[65] * 6], config, mask_token_id=kit.MASK, seeds=[seed])
        assert updates[seed][-1].tokens == alone.completions[0].tolist()


def test_what_a_step_has_found_is_delivered_before_the_pass_that_began_after_it_fails(kit, model):
    forward, updates, broken = model._forward, {}, []

    def breaks(tokens_BL, *rest):
        # The last pass of a block, in which the short row has nothing to do.
        broken.append((tokens_BL[-1] == kit.MASK).sum() == 1)
        if any(broken):
            raise RuntimeError("the model broke for good")
        return forward(tokens_BL, *rest)

    model._forward = breaks
    rows = [row_of(4, length, seed=length, deliver=updates.setdefault(length, []).append) for length in (3, 4)]
    engine = BatchingEngine(model, mask_token_id=kit.MASK, device="cpu", decode=str, limits=ServerLimits())
    engine.submit(rows)
    engine.start()
    try:
        kit.until(lambda: all(row.done for row in rows))
    finally:
        engine.close()
    (short,), (long,) = updates.values()
    assert (len(short.tokens), short.finish_reason, short.error) == (3, "length", None)
    assert "for good" in str(long.error)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_row_is_tried_alone_where_it_fails_beside_one_that_is_not_live(kit, model, given_up):
    """The one beside it has ended, or was given up when the pass that fails had begun."""
    forward, updates, failures = model._forward, {}, []

    def breaks(tokens_BL, *rest):
        if len(tokens_BL) == 2 and (tokens_BL[1] == kit.MASK).sum() == 1:
            rows[0].abandoned = given_up
            failures.append(tokens_BL)
            raise RuntimeError("two are too many")
        return forward(tokens_BL, *rest)

    model._forward = breaks
    lengths = (5 if given_up else 3), 8
    rows = [row_of(4, length, seed=length, deliver=updates.setdefault(length, []).append) for length in lengths]
    engine = BatchingEngine(model, mask_token_id=kit.MASK, device="cpu", decode=str, limits=ServerLimits())
    engine.submit(rows)
    engine.start()
    try:
        kit.until(lambda: not any(row.is_live for row in rows))
    finally:
        engine.close()
    assert len(failures) == 1 and [update.error for update in updates[8]] == [None]
    alone = generate(model, [[65] * 4], SamplerConfig(**EXACT, max_new_tokens=8), mask_token_id=kit.MASK, seeds=[8])
    assert updates[8][-1].tokens == alone.completions[0].tolist()
