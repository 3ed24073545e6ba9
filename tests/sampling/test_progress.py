"""The order of blocks and the pace within them. Shape letters: B rows, T canvas positions."""

import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.blocks import block_indices, gather_window
from nemo_dllm.collections.diffusion.sampling.progress import Progress, block_plan


def progress(holes, lockstep=None, **fields):
    config = SamplerConfig(max_new_tokens=99, **fields)
    holes_BT = torch.tensor(holes, dtype=torch.bool)
    return Progress(holes_BT, block_indices(holes_BT, config.block_size, config.counts_blocks_from), config, lockstep)


def test_blocks_by_hand():
    holes_BT = torch.tensor([[False] + [True] * 7, [True, True] + [False] * 6])
    assert block_indices(holes_BT, 3).tolist() == [[-1, 0, 0, 0, 1, 1, 1, 2], [0, 0, 0, 1, 1, 1, 2, 2]]
    assert block_indices(holes_BT, 3, "sequence").tolist() == [[0, 0, 0, 1, 1, 1, 2, 2]] * 2
    assert block_indices(holes_BT, None).tolist() == [[0] * 8] * 2


def test_a_window_gathers_from_the_left_and_pads_on_the_right():
    chosen_BT = torch.tensor([[False, True, True, False, True], [False] * 5, [True, False, False, False, True]])
    window = gather_window(chosen_BT)
    assert window.valid_BL.tolist() == [[True] * 3, [False] * 3, [True, True, False]]
    assert window.index_BL[0].tolist() == [1, 2, 4] and window.index_BL[2, :2].tolist() == [0, 4]


def test_blocks_share_the_steps_of_their_row_rounded_up():
    holes_T = torch.tensor([False] + [True] * 7)
    blocks_T = torch.tensor([-1, 0, 0, 0, 1, 1, 1, 2])
    # ceil(4 / 3) = 2 steps for blocks of 3, 3 and 1 holes.
    plan = block_plan(holes_T, blocks_T, SamplerConfig(steps=4, block_size=3))
    assert plan == [(0, [2, 1]), (1, [2, 1]), (2, [1])]
    per_block = block_plan(holes_T, blocks_T, SamplerConfig(steps_per_block=1, block_size=3))
    assert per_block == [(0, [3]), (1, [3]), (2, [1])]
    assert block_plan(holes_T, blocks_T, SamplerConfig(block_size=3)) == [(0, []), (1, []), (2, [])]


def test_even_block_counts_the_given_part_of_a_block():
    holes_T, blocks_T = torch.tensor([False, True, True, True]), torch.zeros(4, dtype=torch.int64)
    config = SamplerConfig(steps_per_block=2, block_size=4, schedule="even_block")
    assert block_plan(holes_T, blocks_T, config) == [(0, [2, 2])]


def test_rows_move_on_by_themselves_or_wait():
    holes = [[1, 1, 1, 1], [0, 0, 1, 1]]
    alone = progress(holes, block_size=2, block_origin="sequence")
    assert alone.blocks() == [0, 1]
    assert alone.advance([0, 1], [0, 0]) == [True, False] and alone.blocks() == [1, 1]
    together = progress(holes, lockstep="block", block_size=2, block_origin="sequence")
    assert together.blocks() == [0, None]
    assert together.advance([0, 0], [0, 0]) == [True, False] and together.blocks() == [1, 1]
    together.end([False, True])
    assert together.blocks() == [1, None]


def test_rows_take_turns_though_their_blocks_have_other_numbers():
    turns = progress([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], lockstep="turn", block_size=2, block_origin="sequence")
    assert turns.blocks() == [1, 0]
    assert turns.advance([0, 1], [0, 0]) == [True, False] and turns.blocks() == [None, 0]
    assert turns.advance([0, 0], [0, 0]) == [False, True] and turns.blocks() == [2, 1]
    turns.end([True, False])
    assert turns.blocks() == [None, 1]


def test_a_full_block_waits_for_edits():
    edited = progress([[1, 1]], editing_threshold=0.5, max_post_steps=2)
    assert edited.advance([1], [0]) == [False]
    assert edited.advance([0], [0]) == [False]  # full now
    assert edited.advance([0], [1]) == [False]
    assert edited.advance([0], [1]) == [True]  # two post steps
    quiet = progress([[1, 1]], editing_threshold=0.5, max_post_steps=9)
    assert quiet.advance([0], [1]) == [False] and quiet.advance([0], [0]) == [True]
    assert progress([[1, 1]], editing_threshold=0.5, max_post_steps=0).advance([0], [0]) == [True]
