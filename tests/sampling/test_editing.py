"""Editing of generated tokens. Shape letters: B rows, T positions, V vocabulary."""

import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate
from nemo_dllm.collections.diffusion.sampling.denoise import denoise

M = 9


class Corrector:
    """Proposes token 1 everywhere while anything is masked, and what ``final`` says once all is filled.

    ``final`` maps positions to (token, probability).
    """

    def __init__(self, final, first=0.6):
        self.final, self.first, self.passes = final, first, 0

    def __call__(self, tokens_BT, *, key_mask_BT):
        self.passes += 1
        probabilities_TV = torch.full((tokens_BT.shape[1], 10), 1e-6)
        probabilities_TV[:, 1] = self.first
        probabilities_TV[:, 0] = 1 - self.first
        if not (tokens_BT == M).any():
            for position, (token, probability) in self.final.items():
                probabilities_TV[position] = (1 - probability) / 9
                probabilities_TV[position, token] = probability
        return probabilities_TV.log()[None].expand(len(tokens_BT), -1, -1)


def completion(model, prompt=(), length=4, **fields):
    return generate(model, [list(prompt)], SamplerConfig(length, **fields), mask_token_id=M).completions[0].tolist()


def test_sure_corrections_replace_generated_tokens():
    final = {1: (5, 0.95), 2: (6, 0.7)}
    assert completion(Corrector(final), threshold=0.0) == [1, 1, 1, 1]
    assert completion(Corrector(final), threshold=0.0, editing_threshold=0.9) == [1, 5, 1, 1]
    assert completion(Corrector(final), threshold=0.0, editing_threshold=0.6) == [1, 5, 6, 1]


def test_the_prompt_is_never_edited():
    model = Corrector({i: (5, 0.99) for i in range(6)})
    result = generate(model, [[7, 8]], SamplerConfig(4, threshold=0.0, editing_threshold=0.0), mask_token_id=M)
    assert result.sequences[0].tolist() == [7, 8, 5, 5, 5, 5]


def test_post_steps_end_when_nothing_changes_or_at_their_limit():
    model = Corrector({0: (5, 0.99)})
    completion(model, threshold=0.0, editing_threshold=0.9)
    assert model.passes == 3  # one fills, one edits, one finds nothing to edit

    class Restless(Corrector):
        def __call__(self, tokens_BT, *, key_mask_BT):
            self.final = {0: (5 if tokens_BT[0, 0] == 6 else 6, 0.99)}
            return super().__call__(tokens_BT, key_mask_BT=key_mask_BT)

    for limit in (0, 1, 4):
        model = Restless({})
        completion(model, threshold=0.0, editing_threshold=0.9, max_post_steps=limit)
        assert model.passes == 1 + limit


def test_tokens_are_edited_while_others_are_still_masked():
    class FirstThought(Corrector):
        def __call__(self, tokens_BT, *, key_mask_BT):
            logits_BTV = super().__call__(tokens_BT, key_mask_BT=key_mask_BT).clone()
            if tokens_BT[0, 0] == 1:
                logits_BTV[0, 0, 7] = 20.0
            return logits_BTV

    canvas_BT = torch.zeros(1, 3, dtype=torch.int64)
    config = SamplerConfig(editing_threshold=0.9)
    steps = list(denoise(FirstThought({}), canvas_BT, torch.ones(1, 3, dtype=torch.bool), M, config))
    assert steps[0].tokens_BT.tolist() == [[1, M, M]] and steps[1].tokens_BT.tolist() == [[7, 1, M]]
    assert [step.edited_BT.nonzero().tolist() for step in steps[:2]] == [[], [[0, 0]]]
    # A committed position counts once, an edit is none.
    assert sum(step.committed_BT.sum() for step in steps) == 3


def test_finished_blocks_are_left_alone():
    class LateThought(Corrector):
        def __call__(self, tokens_BT, *, key_mask_BT):
            logits_BTV = super().__call__(tokens_BT, key_mask_BT=key_mask_BT).clone()
            if tokens_BT[0, 2] != M:
                logits_BTV[0, :2, 7] = 20.0
            return logits_BTV

    assert completion(LateThought({}), block_size=2, editing_threshold=0.9) == [1, 1, 1, 1]
    assert completion(LateThought({}), editing_threshold=0.9) == [7, 7, 1, 1]


def test_an_end_token_ends_the_text_once_it_can_no_longer_be_edited():
    edited_away = Corrector({1: (5, 0.99)}, first=0.4)  # fills everything with token 0
    fields = {"threshold": 0.0, "editing_threshold": 0.9, "eos_token_id": 0}
    assert completion(edited_away, **fields) == [0]
    moved = Corrector({0: (5, 0.99), 1: (5, 0.99)}, first=0.4)
    assert completion(moved, **fields) == [5, 5, 0]


def test_without_an_editing_threshold_nothing_is_scored_twice():
    canvas_BT = torch.zeros(1, 3, dtype=torch.int64)
    steps = list(denoise(Corrector({}), canvas_BT, torch.ones(1, 3, dtype=torch.bool), M, SamplerConfig()))
    assert [step.edited_BT for step in steps] == [None] * 3
