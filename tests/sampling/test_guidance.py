"""Classifier-free guidance. Shape letters: B rows, T canvas positions, V vocabulary."""

import pytest
import torch

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate, infill

M = 22
PROMPTS = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1, 8, 2], [5]]


def lists(rows):
    return [row.tolist() for row in rows]


class PromptReader:
    """Logits [0, 2, 1.9, 0] where the first token of the row is 1, [0, 1, 1.5, 0] where it is masked (3)."""

    def __init__(self):
        self.seen = []

    def __call__(self, tokens_BT, *, key_mask_BT):
        self.seen.append((tokens_BT.tolist(), None if key_mask_BT is None else key_mask_BT.tolist()))
        with_prompt, without = torch.tensor([0.0, 2.0, 1.9, 0.0]), torch.tensor([0.0, 1.0, 1.5, 0.0])
        rows_BV = torch.where(tokens_BT[:, :1] == 1, with_prompt, without)
        return rows_BV[:, None].expand(-1, tokens_BT.shape[1], -1)


def test_a_preference_that_the_prompt_adds_wins():
    class Adds(PromptReader):
        def __call__(self, tokens_BT, *, key_mask_BT):
            with_prompt, without = torch.tensor([0.0, 2.0, 1.9, 0.0]), torch.tensor([0.0, 2.0, 1.0, 0.0])
            rows_BV = torch.where(tokens_BT[:, :1] == 1, with_prompt, without)
            return rows_BV[:, None].expand(-1, tokens_BT.shape[1], -1)

    # u + 2 (c - u) is 2.0 for token 1 and 2.8 for token 2.
    assert generate(Adds(), [[1]], SamplerConfig(1), mask_token_id=3).completions[0].tolist() == [1]
    assert generate(Adds(), [[1]], SamplerConfig(1, cfg_scale=1.0), mask_token_id=3).completions[0].tolist() == [2]


def test_the_unconditional_half_masks_the_prompt_but_no_padding_and_no_kept_token():
    model = PromptReader()
    config = SamplerConfig(2, steps=1, cfg_scale=1.0, cfg_keep_token_ids=(2,))
    generate(model, [[1, 2, 1], [1]], config, mask_token_id=3, pad_token_id=0)
    (conditional, keys), (unconditional, unconditional_keys) = model.seen
    assert conditional == [[1, 2, 1, 3, 3], [1, 3, 3, 0, 0]]
    assert unconditional == [[3, 2, 3, 3, 3], [3, 3, 3, 0, 0]]
    assert keys == unconditional_keys == [[True] * 5, [True] * 3 + [False] * 2]


def test_generated_tokens_are_seen_by_both_halves():
    model = PromptReader()
    generate(model, [[1]], SamplerConfig(2, cfg_scale=1.0), mask_token_id=3)
    assert [tokens for tokens, _ in model.seen] == [[[1, 3, 3]], [[3, 3, 3]], [[1, 1, 3]], [[3, 1, 3]]]


def test_in_infilling_the_given_tokens_are_masked():
    model = PromptReader()
    infill(
        model, [[1, 0, 2, 0]], [[False, True, False, True]], SamplerConfig(2, steps=1, cfg_scale=2.0), mask_token_id=3
    )
    assert [tokens for tokens, _ in model.seen] == [[[1, 3, 2, 3]], [[3, 3, 3, 3]]]


@pytest.mark.parametrize("logit", [30.0, 65504.0])
def test_the_largest_scale_still_tells_tokens_apart(logit):
    """Token 2 is what the prompt adds most; where both halves agree, nothing is multiplied to NaN."""

    def model(tokens_BT, *, key_mask_BT):
        with_prompt, without = torch.tensor([-logit, 0.5 * logit, logit, 0.0]), torch.tensor([logit, 0.0, -logit, 0.0])
        rows_BV = torch.where(tokens_BT[:, :1] == 1, with_prompt, without)
        return rows_BV[:, None].expand(-1, tokens_BT.shape[1], -1)

    config = SamplerConfig(2, cfg_scale=1e6, temperature=1.0, seed=0)
    assert generate(model, [[1]], config, mask_token_id=3).completions[0].tolist() == [2, 2]


@pytest.mark.parametrize("fields", [{}, {"cfg_keep_token_ids": (8,)}, {"block_size": 3, "temperature": 0.5, "seed": 1}])
def test_a_guided_batch_gives_what_its_rows_give_alone(context_model, fields):
    config = SamplerConfig(6, cfg_scale=1.5, **fields)
    together = generate(context_model(), PROMPTS, config, mask_token_id=M)
    alone = [generate(context_model(), [PROMPTS[i]], config, mask_token_id=M, row_ids=[i]) for i in range(3)]
    assert lists(together.sequences) == [single.sequences[0].tolist() for single in alone]
    unguided = generate(context_model(), PROMPTS, SamplerConfig(6, **fields), mask_token_id=M)
    assert lists(together.sequences) != lists(unguided.sequences)
