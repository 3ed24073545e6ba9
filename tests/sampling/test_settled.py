"""What a reader may be shown before a run ends, and rows that nobody waits for any more."""

import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, canvas_pieces, denoise

M = 9


def canvas(rows, positions):
    tokens_BT = torch.full((rows, positions), M)
    return tokens_BT, torch.ones_like(tokens_BT, dtype=torch.bool)


def run(model, rows, positions, abandoned=None, **fields):
    config = SamplerConfig(max_new_tokens=positions, **fields)
    return list(denoise(model, *canvas(rows, positions), M, config, abandoned=abandoned))


def settled(steps, row=0):
    return [step.settled_BT[row].nonzero().flatten().tolist() for step in steps]


def test_tokens_are_settled_once_no_hole_is_before_them(table_model):
    model = table_model({0: {1: 0.5}, 1: {2: 0.9}, 2: {3: 0.8}, 3: {4: 0.6}})
    assert settled(run(model, 1, 4)) == [[], [], [], [0, 1, 2, 3]]
    assert settled(run(model, 1, 4, block_size=2)) == [[], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_a_row_that_has_ended_is_settled_whole(table_model):
    model = table_model({0: {7: 0.9}, 1: {2: 0.8}, 2: {3: 0.7}})
    assert settled(run(model, 1, 3, eos_token_id=7)) == [[0, 1, 2]]


def test_what_may_still_be_edited_is_not_settled():
    def model(tokens_BT, *, key_mask_BT):
        # The other token of 0 and 1 wherever one of them is shown: edits never cease by themselves.
        return torch.nn.functional.one_hot((tokens_BT == 0).long(), 10).float() * 20

    steps = run(model, 1, 4, block_size=2, threshold=0.0, editing_threshold=0.5, max_post_steps=2)
    shown = settled(steps)
    for index, (step, positions) in enumerate(zip(steps, shown, strict=True)):
        for later in steps[index:]:
            assert torch.equal(later.tokens_BT[0, positions], step.tokens_BT[0, positions])
    assert [len(positions) for positions in shown] == [0, 0, 2, 2, 2, 4]


def test_an_abandoned_row_ends_and_changes_no_other(context_model):
    fields = {"temperature": 1.0, "seed": 3}
    model = context_model()
    alone = run(model, 2, 6, **fields)
    asked = []

    def abandoned():
        asked.append(None)
        return [False, len(asked) > 2]

    steps = run(model, 2, 6, abandoned, **fields)
    assert torch.equal(steps[-1].tokens_BT[0], alone[-1].tokens_BT[0])
    assert torch.equal(steps[-1].tokens_BT[1], alone[1].tokens_BT[1])
    assert int(steps[-1].holes_BT[1].sum()) == 4
    assert run(model, 2, 6, lambda: [True, True]) == []


def test_a_canvas_in_pieces():
    pieces = canvas_pieces([1, 2, 9, 9, 3], [False, False, True, True, False], [True, False, False, False, False], str)
    assert list(pieces) == [("[1", "new"), (", 2]", "old"), ("░░", "mask"), ("[3]", "old")]
