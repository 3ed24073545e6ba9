"""Stub models whose output is known by hand. Shape letters: B rows, T positions, V vocabulary."""

import pytest
import torch


class TableModel:
    """Position -> {token: probability}; what is left goes evenly to the other tokens, the mask token gets nothing.

    Positions without an entry are uniform. ``seen`` keeps the tokens of every forward pass.
    """

    def __init__(self, table, vocab=10, mask_id=9, dtype=torch.float32):
        self.table, self.vocab, self.mask_id, self.dtype = table, vocab, mask_id, dtype
        self.seen = []

    def probabilities(self, position):
        given = self.table.get(position, {})
        others = [i for i in range(self.vocab) if i not in given and i != self.mask_id]
        probabilities_V = torch.zeros(self.vocab, dtype=torch.float64)
        probabilities_V[others] = (1 - sum(given.values())) / max(1, len(others))
        for token, probability in given.items():
            probabilities_V[token] = probability
        return probabilities_V

    def __call__(self, tokens_BT, *, key_mask_BT):
        self.seen.append(tokens_BT.clone())
        rows, positions = tokens_BT.shape
        logits_TV = torch.stack([self.probabilities(i) for i in range(positions)]).clamp_min(1e-30).log()
        return logits_TV.to(self.dtype).expand(rows, -1, -1).clone()


class ContextModel:
    """Random logits from every visible token and its distance; float64, so that batching changes nothing."""

    def __init__(self, vocab=23, seed=0, ignore_key_mask=False):
        generator = torch.Generator().manual_seed(seed)
        self.embedding_VV = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
        self.ignore_key_mask = ignore_key_mask

    def __call__(self, tokens_BT, *, key_mask_BT):
        positions_T = torch.arange(tokens_BT.shape[1], dtype=torch.float64)
        weights_TT = torch.cos(1.7 * (positions_T[:, None] - positions_T)) + 0.3
        values_BTV = self.embedding_VV[tokens_BT]
        if key_mask_BT is not None and not self.ignore_key_mask:
            values_BTV = values_BTV * key_mask_BT[..., None]
        return weights_TT @ values_BTV


@pytest.fixture
def table_model():
    return TableModel


@pytest.fixture
def context_model():
    return ContextModel
