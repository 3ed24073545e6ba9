"""Rows moved to another run equal rows alone. Shape letters: B rows, T canvas positions, S cache slots."""

from dataclasses import replace

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import KVCache, ReferenceQuirks, SamplerConfig, generate
from nemo_dllm.collections.diffusion.sampling.blocks import Canvas, block_indices
from nemo_dllm.collections.diffusion.sampling.joining import Picked, can_join_rows, keeps_places, stack_rows
from nemo_dllm.collections.diffusion.sampling.noise import GlobalNoise, RowNoise
from nemo_dllm.collections.diffusion.sampling.progress import Progress
from nemo_dllm.collections.diffusion.sampling.run import DenoisingRun
from nemo_dllm.collections.diffusion.sampling.stopping import TextEnds

CPU = torch.device("cpu")
M = 196
FIRST, SECOND = [[12, 60, 4], [29, 12, 4, 0, 159, 33, 91, 8, 7]], [[5], [88, 7, 1, 8, 3, 3, 41, 8, 90, 2, 17]]
NEW_TOKENS = 8


def canvas_of(lengths, holes, block_size):
    positions_T = torch.arange(max(lengths))
    keys_BT = positions_T < torch.tensor(lengths)[:, None]
    holes_BT = keys_BT & (positions_T >= torch.tensor([[n - holes] for n in lengths]))
    return Canvas(holes_BT, block_indices(holes_BT, block_size, "sequence"), keys_BT, len(set(lengths)) > 1)


def run_of(model, prompts, seeds, config, noise=None):
    canvas = canvas_of([len(prompt) + NEW_TOKENS for prompt in prompts], NEW_TOKENS, config.block_size)
    tokens_BT = torch.full(canvas.holes_BT.shape, M)
    for tokens_T, prompt in zip(tokens_BT, prompts, strict=True):
        tokens_T[: len(prompt)] = torch.tensor(prompt)
    noise = noise or RowNoise(seeds, [0] * len(prompts), CPU)
    return DenoisingRun(model, tokens_BT, canvas, M, config, noise, TextEnds(config, None))


def take(steps, count):
    for _ in range(count):
        next(steps)


SETTINGS = [
    {},
    {"steps": 3, "schedule": "cosine"},
    {"right_shift": True},
    {"cfg_scale": 1.0, "cfg_keep_token_ids": (12,)},
    {"editing_threshold": 0.0, "max_post_steps": 2},
    {"cache": "exact"},
    {"cache": "exact", "right_shift": True},
    {"cache": "exact", "cfg_scale": 1.0},
    {"cache": "approximate_prefix", "block_origin": "sequence", "right_shift": True},
    {"cache": "approximate_dual", "block_origin": "sequence", "cfg_scale": 0.5},
    {"cache": "approximate_delayed", "block_origin": "sequence", "refresh_interval": 3, "right_shift": True},
]


@pytest.mark.parametrize("fields", SETTINGS, ids=lambda fields: "-".join(map(str, fields)) or "default")
@pytest.mark.parametrize("picked", [((1,), (0,)), ((0,), (1,)), ((0, 1), (1, 0)), ((0,), ())])
def test_rows_of_two_runs_go_on_as_they_would_alone(tiny_decoder, fields, picked):
    config = SamplerConfig(NEW_TOKENS, **{"block_size": 4, "temperature": 1.0, "block_origin": "sequence", **fields})
    model = tiny_decoder("sdar", 4 if config.cache == "exact" else None)
    runs = [run_of(model, FIRST, [3, 4], config), run_of(model, SECOND, [5, 6], config)]
    for run, passes in zip(runs, (2, 1), strict=True):
        take(run.steps(), passes)
    joined = DenoisingRun.join_rows([Picked(run, rows) for run, rows in zip(runs, picked, strict=True) if rows])
    *_, last = joined.steps()
    given = [
        (prompts[row], 3 + 2 * number + row)
        for number, (prompts, rows) in enumerate(zip((FIRST, SECOND), picked, strict=True))
        for row in rows
    ]
    assert not last.holes_BT.any()
    assert last.tokens_BT.shape[1] == max(len(prompt) for prompt, _ in given) + NEW_TOKENS
    for tokens_T, (prompt, seed) in zip(last.tokens_BT, given, strict=True):
        alone = generate(model, [prompt], config, mask_token_id=M, seeds=[seed])
        assert tokens_T[: len(prompt) + NEW_TOKENS].tolist() == alone.sequences[0].tolist()


def test_what_is_kept_in_the_cache_is_not_encoded_again(tiny_decoder):
    config = SamplerConfig(NEW_TOKENS, block_size=4, cache="exact")
    model = tiny_decoder("sdar")
    runs = [run_of(model, [prompt], [seed], config) for seed, prompt in enumerate(FIRST)]
    for run in runs:
        take(run.steps(), 1)
    lengths, forward = [], model._forward
    model._forward = lambda tokens_BL, *rest: (lengths.append(tokens_BL.shape), forward(tokens_BL, *rest))[1]
    joined = DenoisingRun.join_rows([Picked(run, [0]) for run in runs])
    take(joined.steps(), 1)
    # Row 0 has finished its first block, which is encoded with the next one; row 1 is in a block, its prompt is kept.
    assert lengths == [(2, 8)]


def test_noise_goes_on_where_it_was():
    whole_BT = torch.ones(1, 4, dtype=torch.bool)
    first, second = RowNoise([1, 2], [0, 0], CPU), RowNoise([3], [0], CPU)
    first.uniform(whole_BT.expand(2, -1))
    joined = RowNoise.join_rows([Picked(second, [0]), Picked(first, [1])]).uniform(whole_BT.expand(2, -1))
    alone = RowNoise([2], [0], CPU)
    alone.uniform(whole_BT)
    assert torch.equal(joined[:4], RowNoise([3], [0], CPU).uniform(whole_BT))
    assert torch.equal(joined[4:], alone.uniform(whole_BT))


def test_progress_keeps_block_and_pass_and_counts_turns_anew():
    config = SamplerConfig(8, block_size=2, steps_per_block=2, block_origin="sequence")
    whole_BT = torch.ones(2, 6, dtype=torch.bool)
    made = [Progress(whole_BT, block_indices(whole_BT, 2, "sequence"), config, "turn") for _ in range(2)]
    for holes_left in ([1, 1], [0, 0], [1, 1]):
        made[0].advance(holes_left, [0, 0])
    assert not made[0].is_between_blocks and made[1].is_between_blocks
    joined = Progress.join_rows([Picked(made[0], [1]), Picked(made[1], [0])])
    # The newcomer does not have to catch up with the block that the other one has finished before.
    assert joined.blocks() == [1, 0] and not joined.is_between_blocks
    assert joined.advance([0, 1], [0, 0]) == [True, False]
    assert joined.blocks() == [None, 0]


def test_turns_count_from_the_slowest_row_of_a_run_that_goes_on():
    config = SamplerConfig(8, block_size=2, steps_per_block=2, block_origin="sequence")
    whole_BT = torch.ones(3, 6, dtype=torch.bool)
    old, new = (Progress(whole_BT, block_indices(whole_BT, 2, "sequence"), config, "turn") for _ in range(2))
    old.advance([1, 1, 1], [0, 0, 0])
    # In the middle of a block, which would keep others out for good.
    old.end([True, False, False])
    assert not old.is_between_blocks
    for holes_left in ([0, 0, 0], [1, 1, 1], [0, 0, 0]):
        old.advance(holes_left, [0, 0, 0])
    assert old.is_between_blocks
    # The row that has ended stays in its place, and others are on both sides of the new one's.
    joined = Progress.join_rows([Picked(old, [0]), Picked(new, [1]), Picked(old, [2, 1])])
    assert joined.blocks() == [None, 0, 2, 2]


def test_an_end_token_behind_holes_still_ends_the_text_of_a_row_that_has_moved(table_model):
    model = table_model({1: {1: 0.5}, 2: {8: 0.9}}, vocab=M + 1, mask_id=M)
    run = run_of(model, [[0]], [3], SamplerConfig(NEW_TOKENS, eos_token_id=8))
    take(run.steps(), 1)
    assert run.tokens_BT.tolist() == [[0, M, 8, *[M] * 6]]
    (last,) = DenoisingRun.join_rows([Picked(run, (0,))]).steps()
    assert last.tokens_BT.tolist() == [[0, 1, *[8] * 7]] and last.settled_BT[0, 1:].all()


def test_what_comes_before_the_first_blocks_is_encoded_once(tiny_decoder):
    config = SamplerConfig(NEW_TOKENS, block_size=4, block_origin="sequence", cache="exact")
    model = tiny_decoder("sdar")
    run = run_of(model, FIRST, [1, 2], config)
    lengths, forward = [], model._forward
    model._forward = lambda tokens_BL, *rest: (lengths.append(tokens_BL.shape), forward(tokens_BL, *rest))[1]
    run.encode()
    assert lengths == [(2, 8)]
    take(run.steps(), 1)
    assert lengths == [(2, 8), (2, 4)]


def test_rows_keep_their_places_where_all_caches_suit(tiny_decoder):
    model = tiny_decoder("sdar", 4)
    exact = SamplerConfig(NEW_TOKENS, block_size=4, block_origin="sequence", cache="exact")
    for config in (exact, replace(exact, cfg_scale=1.0), replace(exact, cache="approximate_delayed")):
        run = run_of(model, FIRST, [1, 2], config)
        # Two rows of 17 positions and a slot for padding.
        assert [keeps_places(run, 2, columns) for columns in (8, 17, 18)] == [True, True, False]
        assert [keeps_places(run, 1, 17), keeps_places(run, 1, 16), keeps_places(run, 3, 17)] == [True, False, False]
    assert not keeps_places(run_of(model, FIRST, [1, 2], SamplerConfig(NEW_TOKENS)), 2, 17)
    branch = run_of(model, FIRST, [1, 2], replace(exact, cfg_scale=1.0))
    branch.score._unconditional._cache = KVCache(2, 40)
    assert not keeps_places(branch, 2, 17)


def test_a_canvas_is_as_wide_as_its_longest_row():
    wide, narrow = canvas_of([7, 5], 3, 4), canvas_of([4, 3], 2, 4)
    joined = Canvas.join_rows([Picked(wide, [1]), Picked(narrow, [0])])
    assert joined.holes_BT.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]]
    assert joined.keys_BT.int().tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]] and joined.padded
    assert joined.blocks_BT[0].tolist() == [0, 0, 0, 0, 1]
    assert not Canvas.join_rows([Picked(narrow, [0])]).padded


def test_a_cache_takes_slots_along_and_its_padding_slot_is_always_the_last():
    def cache(positions, values, layers):
        made = KVCache(len(values), positions)
        window = made.window(torch.arange(len(values[0])).expand(len(values), -1), torch.tensor(values) > 0)
        for layer in range(layers):
            made.write(
                layer, window, torch.tensor(values)[..., None, None] + layer, -torch.tensor(values)[..., None, None]
            )
        made.hold(window)
        return made

    narrow, wide = cache(2, [[1.0, 2.0], [3.0, 4.0]], 2), cache(4, [[5.0, 6.0, 7.0, 8.0]], 2)
    joined = KVCache.join_rows([Picked(narrow, [1]), Picked(wide, [0])], 4)
    assert joined.held_BS.int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 0]]
    window = joined.window(torch.tensor([[2], [0]]), torch.tensor([[True], [False]]))
    keys, values = joined.write(1, window, torch.full((2, 1, 1, 1), 9.0), torch.full((2, 1, 1, 1), -9.0))
    assert keys[0, :3].flatten().tolist() == [4, 5, 9] and values[1, :4].flatten().tolist() == [-5, -6, -7, -8]
    # One that nothing has been written to brings empty slots.
    empty = KVCache.join_rows([Picked(KVCache(1, 2), [0]), Picked(narrow, [0])], 2)
    assert empty.held_BS.int().tolist() == [[0, 0, 0], [1, 1, 0]]


def test_rows_of_one_part_may_be_on_both_sides_of_others():
    a_BT, b_BT = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7]])
    picked = [Picked(a_BT, [1]), Picked(b_BT, [0]), Picked(None, [3]), Picked(a_BT, [0, 1])]
    assert stack_rows(picked, 2).tolist() == [[4, 5], [7, 0], [0, 0], [1, 2], [4, 5]]


def test_stacked_rows_are_cut_and_filled():
    a_BT, b_BT = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[7]])
    assert stack_rows([Picked(a_BT, [1]), Picked(b_BT, [0])], 2).tolist() == [[4, 5], [7, 0]]
    assert stack_rows([Picked(None, [0, 4]), Picked(a_BT[:, 0], [1])]).tolist() == [0, 0, 4]
    assert stack_rows([Picked(None, [0])]) is None
    # Without a number of columns, all have as many.
    with pytest.raises(RuntimeError, match="same slice shapes"):
        stack_rows([Picked(a_BT, [1]), Picked(b_BT.expand(-1, 2), [0])])


def test_texts_that_have_been_looked_at_are_not_decoded_again():
    seen = []

    def decode(ids):
        seen.append(list(ids))
        return "".join(chr(97 + i) for i in ids)

    config = SamplerConfig(4, stop_strings=("z",), stop_token_ids=(9,))
    tokens_BT, settled_BT = torch.tensor([[1, 2], [3, 25]]), torch.ones(2, 2, dtype=torch.bool)
    old, new = TextEnds(config, decode), TextEnds(config, decode)
    assert old.ended(tokens_BT, settled_BT) == [False, True]
    joined = TextEnds.join_rows([Picked(old, [1]), Picked(new, [0])])
    seen.clear()
    assert joined.ended(tokens_BT.flip(0), settled_BT) == [True, False]
    assert seen == [[1, 2]]


def test_a_part_without_the_operation_keeps_its_rows(tiny_decoder):
    model = tiny_decoder("sdar")
    exact = SamplerConfig(NEW_TOKENS, block_size=4, cache="exact", cfg_scale=1.0)
    assert can_join_rows(run_of(model, FIRST, [1, 2], exact))
    model.new_cache = lambda rows, positions: object()
    assert not can_join_rows(run_of(model, FIRST, [1, 2], exact))
    plain = SamplerConfig(NEW_TOKENS, quirks=ReferenceQuirks(global_noise=True))
    assert can_join_rows(run_of(model, FIRST, [1, 2], plain))
    # Its numbers depend on all rows of a pass.
    assert not can_join_rows(run_of(model, FIRST, None, plain, GlobalNoise()))
    scored = run_of(model, FIRST, [1, 2], plain)
    scored.score = lambda *given: None
    assert not can_join_rows(scored)
