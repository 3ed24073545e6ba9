"""How many operations of torch a step takes besides the model: at one row they are most of what a step costs.

Shape letters: B rows, T canvas positions, L positions of one pass, N scored positions, V vocabulary.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate_stream

VOCABULARY = 97
MASK = VOCABULARY - 1


class Counted(TorchDispatchMode):
    """Counts operations, and those that read or write numbers for the whole vocabulary."""

    def __init__(self):
        super().__init__()
        self.operations, self.over_vocabulary = 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations += 1
        tensors = [value for value in (*args, result) if isinstance(value, torch.Tensor)]
        work = not function.is_view and any(x.ndim > 1 and x.shape[-1] == VOCABULARY for x in tensors)
        self.over_vocabulary += work
        return result


class Stored:
    """Logits that are there before they are asked for."""

    vocabulary_size = VOCABULARY

    def __init__(self):
        self.logits_LV = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(0)).bfloat16()

    def score_positions(self, tokens_BT, rows_N, positions_N, *, key_mask_BT=None):
        return self.logits_LV[: len(rows_N)]

    def new_cache(self, rows, positions):
        return None

    def denoise(self, tokens_BL, positions_BL, cache, *, key_mask_BL):
        return self.logits_LV[None, : tokens_BL.shape[1]]

    def commit(self, tokens_BL, positions_BL, cache, *, key_mask_BL, blocks_BL):
        return self.logits_LV[:1]

    def commit_and_score(self, tokens_BL, positions_BL, cache, rows_N, columns_N, **masks):
        return self.logits_LV[: len(rows_N)]


def operations(**fields):
    """Of each step after the first one, which fills tables that are kept: all, and those over the vocabulary."""
    config = SamplerConfig(16, seed=0, **fields)
    steps = generate_stream(Stored(), [[1, 2, 3, 4]], config, mask_token_id=MASK)
    next(steps)
    counts = []
    while True:
        with Counted() as counted:
            if next(steps, None) is None:
                return counts
        counts.append((counted.operations, counted.over_vocabulary))


@pytest.mark.parametrize(
    "fields, most, over_vocabulary",
    [
        ({"block_size": 16}, 24, 6),
        ({"steps": 4, "schedule": "even"}, 24, 6),
        ({"threshold": 0.06}, 24, 6),
        ({"eos_token_id": 5}, 24, 6),
        ({"temperature": 0.7}, 38, 16),
        ({"block_size": 16, "cache": "approximate_prefix"}, 27, 7),
        ({"block_size": 16, "cache": "approximate_dual"}, 27, 7),
        ({"block_size": 32, "cache": "exact"}, 27, 7),
    ],
    ids=str,
)
def test_steps_within_a_block_take_few_operations(fields, most, over_vocabulary):
    counts = operations(**fields)
    assert counts and max(total for total, _ in counts) <= most
    assert max(of_logits for _, of_logits in counts) <= over_vocabulary


@pytest.mark.parametrize("cache, most", [(None, 42), ("approximate_dual", 78), ("exact", 77)])
def test_to_begin_a_block_takes_few_more(cache, most):
    counts = [total for total, _ in operations(block_size=4, block_origin="sequence", cache=cache)]
    # The next pass begins before a step is there; behind the last one there is none.
    within, last = counts[0], counts.pop()
    begins = [number for number, total in enumerate(counts) if total > within]
    assert begins == [2, 6, 10] and max(counts) <= most and last < within


def test_the_count_counts():
    with Counted() as counted:
        a_NV = torch.zeros(2, VOCABULARY)
        a_NV[0].sum()
        a_NV.exp().masked_fill_(a_NV > 0, 1)
    assert counted.operations == 6  # zeros, a row, its sum, exp, a comparison and masked_fill_
    assert counted.over_vocabulary == 4
