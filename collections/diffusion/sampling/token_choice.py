"""Choosing one token per candidate position from its logits.

Shape letters: N scored positions of all rows in row-major order, V vocabulary.
"""

from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.noise import gumbel

_END_OF_IDS = torch.iinfo(torch.int64).max


def as_token_id(name: str, value: SupportsIndex) -> int:
    """A token's number, which may come as a number of numpy or torch.

    Args:
        name: of the argument.
        value: that a user gave.

    Raises:
        ValueError: it is none, whatever the vocabulary.
    """
    try:
        token_id = -1 if isinstance(value, bool) else index(value)
    except TypeError:
        token_id = -1
    if not 0 <= token_id < _END_OF_IDS:
        raise ValueError(f"{name}={value!r} must be a token id, a whole number of at least 0")
    return token_id


def check_token_ids(config: SamplerConfig, mask_token_id: int, vocabulary: int) -> None:
    """Raise ValueError where a token id lies outside the vocabulary, every token is suppressed, or ends are masks."""
    several = ("suppress_token_ids", "begin_suppress_token_ids", "stop_token_ids", "cfg_keep_token_ids")
    ids = {"mask_token_id": (mask_token_id,)} | {name: getattr(config, name) for name in several}
    ids |= {
        name: (getattr(config, name),) for name in ("eos_token_id", "bos_token_id") if getattr(config, name) is not None
    }
    if mask_token_id in config.end_token_ids:
        raise ValueError(
            f"mask_token_id={mask_token_id} is in eos_token_id or stop_token_ids as well, which fill ended rows; "
            "give the token that ends a text"
        )
    for field, values in ids.items():
        for token_id in values:
            if not 0 <= token_id < vocabulary:
                raise ValueError(
                    f"{field}: {token_id} is outside the model's vocabulary of {vocabulary}; "
                    f"choose an id from 0 to {vocabulary - 1}"
                )
    first = config.begin_suppress_token_ids
    if config.min_new_tokens > 0:
        first = (*first, *_early_ends(config))
    if len({mask_token_id, *config.suppress_token_ids, *first}) >= vocabulary:
        raise ValueError(
            f"suppress_token_ids, begin_suppress_token_ids, end tokens with min_new_tokens={config.min_new_tokens} "
            f"and the mask token are the whole vocabulary of {vocabulary}; leave a token to choose"
        )


def check_given_tokens(tokens_BT: Tensor, vocabulary: int | None) -> None:
    """Raise ValueError where tokens of a canvas on the CPU are outside the vocabulary; None knows no upper end."""
    tokens_BT, end = tokens_BT.numpy(), vocabulary or _END_OF_IDS
    if tokens_BT.min(initial=0) < 0 or tokens_BT.max(initial=0) >= end:
        outside_N = tokens_BT[(tokens_BT < 0) | (tokens_BT >= end)]
        of = "" if vocabulary is None else f" of {vocabulary}"
        raise ValueError(
            f"{outside_N[0]} among the given tokens is outside the model's vocabulary{of}; encode the text with "
            "the model's tokenizer, and see to mask_token_id and pad_token_id"
        )


@lru_cache(maxsize=64)
def token_columns(token_ids: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor:
    """Bool [V], True at some tokens. Kept, because to bring it to the device makes the CPU wait."""
    columns_V = torch.zeros(vocabulary, dtype=torch.bool, device="cpu")
    columns_V[torch.tensor(token_ids, dtype=torch.int64, device="cpu")] = True
    return columns_V.to(device)


def tells_first_tokens_apart(config: SamplerConfig) -> bool:
    """Whether some tokens are forbidden at the beginning of a completion only."""
    begin = config.begin_suppress_token_ids and not config.quirks.begin_suppress_by_confidence
    return bool(begin) or config.min_new_tokens > 0


def _early_ends(config: SamplerConfig) -> tuple[int, ...]:
    """Tokens that are none of the first ``min_new_tokens``, whether a row stops at them or not."""
    eos = () if config.eos_token_id is None else (config.eos_token_id,)
    return (*eos, *config.stop_token_ids)


def forbidden_tokens(mask_token_id: int, config: SamplerConfig) -> tuple[int, ...]:
    """Tokens that are never chosen, at any position."""
    if config.quirks.mask_token_allowed:
        return config.suppress_token_ids
    return (*config.suppress_token_ids, mask_token_id)


def only_forbids(config: SamplerConfig) -> bool:
    """Whether logits are restricted by nothing but ``forbidden_tokens``."""
    pays = config.eos_penalty and config.eos_token_id is not None
    return not pays and not tells_first_tokens_apart(config)


def restrict_logits(logits_NV: Tensor, ordinals_N: Tensor | None, mask_token_id: int, config: SamplerConfig) -> Tensor:
    """Float32 logits in which forbidden tokens are -inf, and the end token pays its penalty.

    Infinite ones, to which half precision overflows, become the largest finite number: they stay above all others.

    Args:
        logits_NV: as the model gives them; left alone.
        ordinals_N: int64, how many generated tokens a row has before each position; None is enough unless config
            ``tells_first_tokens_apart``.
        mask_token_id: forbidden, but for a quirk.
        config: suppressed tokens, ``min_new_tokens``, ``eos_penalty`` and quirks are read.
    """
    vocabulary, device = logits_NV.shape[-1], logits_NV.device
    allowed_NV = logits_NV.float().clamp(max=torch.finfo(torch.float32).max)
    if config.eos_penalty and config.eos_token_id is not None:
        allowed_NV[:, config.eos_token_id] -= config.eos_penalty
    forbidden = forbidden_tokens(mask_token_id, config)
    if forbidden:
        allowed_NV.masked_fill_(token_columns(forbidden, vocabulary, device), -torch.inf)
    early = [(_early_ends(config), config.min_new_tokens)]
    if not config.quirks.begin_suppress_by_confidence:
        early.append((config.begin_suppress_token_ids, 1))
    for token_ids, positions in early:
        if token_ids and positions:
            columns_V = token_columns(token_ids, vocabulary, device)
            allowed_NV.masked_fill_(columns_V & (ordinals_N < positions)[:, None], -torch.inf)
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


def temper(logits_NV: Tensor, config: SamplerConfig) -> Tensor:
    """Logits after temperature, then top-k, then top-p, in float64; temperature 0 leaves their scale."""
    if config.temperature > 0:
        # Below the best, so that a temperature next to 0 takes the others to -inf and not several to +inf.
        tempered_NV = logits_NV - logits_NV.amax(dim=-1, keepdim=True).double()
        tempered_NV /= config.temperature
    else:
        tempered_NV = logits_NV.double()
    if config.top_k is not None:
        tempered_NV = keep_top_k(tempered_NV, config.top_k)
    if config.top_p is not None:
        tempered_NV = keep_top_p(tempered_NV, config.top_p)
    return tempered_NV


def choose_tokens(logits_NV: Tensor, config: SamplerConfig, draw_uniform: Callable[..., Tensor]) -> Tensor:
    """Draw a token for each position; at temperature 0 the most probable one, the lowest id among equals.

    Temperature comes first, then top-k, then top-p, then the Gumbel-max draw. All in float64 and on logits rather than
    on their exponentials: exp overflows at logits near 89, and coarse noise skews the distribution
    (Zheng et al. 2024, "Masked diffusion models are secretly time-agnostic").

    Args:
        logits_NV: float32, forbidden tokens at -inf.
        config: temperature, top_k and top_p are read.
        draw_uniform: V -> fresh numbers in [0, 1) of shape [N, V]; called only if the temperature is above 0.

    Returns:
        int64 [N].
    """
    if config.temperature == 0:
        return logits_NV.argmax(dim=-1)
    return gumbel(draw_uniform(logits_NV.shape[-1])).add_(temper(logits_NV, config)).argmax(dim=-1)
