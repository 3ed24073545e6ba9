"""Choosing one token per candidate position from its logits.

Shape letters: N candidate positions of all rows in row-major order, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.noise import RowNoise, gumbel


def forbid_tokens(logits_NV: Tensor, mask_token_id: int, suppress_token_ids: Sequence[int]) -> Tensor:
    """Float32 logits in which the mask token and the suppressed tokens are -inf.

    Raises:
        ValueError: an id lies outside the model's vocabulary.
    """
    vocabulary = logits_NV.shape[-1]
    for field, token_id in [("mask_token_id", mask_token_id), *(("suppress_token_ids", i) for i in suppress_token_ids)]:
        if not 0 <= token_id < vocabulary:
            raise ValueError(
                f"{field}: {token_id} is outside the model's vocabulary of {vocabulary}; "
                f"choose an id from 0 to {vocabulary - 1}"
            )
    allowed_NV = logits_NV.to(torch.float32, copy=True)
    allowed_NV[:, [mask_token_id, *suppress_token_ids]] = -torch.inf
    return allowed_NV


def keep_top_k(logits_NV: Tensor, top_k: int) -> Tensor:
    """Set all but the ``top_k`` largest logits of each position to -inf; ties with the last one stay."""
    smallest_kept_N1 = logits_NV.topk(min(top_k, logits_NV.shape[-1])).values[:, -1:]
    return logits_NV.masked_fill(logits_NV < smallest_kept_N1, -torch.inf)


def keep_top_p(logits_NV: Tensor, top_p: float) -> Tensor:
    """Keep the fewest most probable tokens whose mass reaches ``top_p`` (Holtzman et al. 2020), at least one."""
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    probabilities_NV = sorted_NV.softmax(dim=-1)
    mass_before_NV = probabilities_NV.cumsum(dim=-1) - probabilities_NV
    kept_NV = sorted_NV.masked_fill(mass_before_NV >= top_p, -torch.inf)
    return torch.empty_like(logits_NV).scatter_(-1, order_NV, kept_NV)


def choose_tokens(logits_NV: Tensor, per_row: Sequence[int], config: SamplerConfig, noise: RowNoise) -> Tensor:
    """Draw a token for each candidate; at temperature 0 the most probable one, the lowest id among equals.

    Temperature comes first, then top-k, then top-p, then the Gumbel-max draw. All in float64 and on logits rather than
    on their exponentials: exp overflows at logits near 89, and coarse noise skews the distribution
    (Zheng et al. 2024, "Masked diffusion models are secretly time-agnostic").

    Args:
        logits_NV: float32, forbidden tokens at -inf.
        per_row: candidates of each row, they sum to N.
        config: temperature, top_k and top_p are read.
        noise: drawn from only if the temperature is above 0.

    Returns:
        int64 [N].
    """
    if config.temperature == 0:
        return logits_NV.argmax(dim=-1)
    tempered_NV = logits_NV.double() / config.temperature
    if config.top_k is not None:
        tempered_NV = keep_top_k(tempered_NV, config.top_k)
    if config.top_p is not None:
        tempered_NV = keep_top_p(tempered_NV, config.top_p)
    return (tempered_NV + gumbel(noise.uniform(per_row, logits_NV.shape[-1]))).argmax(dim=-1)
