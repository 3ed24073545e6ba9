"""Where a text ends: at an end token, or where a stop string is complete.

Shape letters: B rows, T canvas positions.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig

Decode = Callable[[list[int]], str]


def text_end(tokens: Sequence[int], config: SamplerConfig, decode: Decode | None) -> int | None:
    """Tokens up to the end of a text, what ends it included; None where nothing does.

    Args:
        tokens: generated ones, in order.
        config: end tokens and stop strings are read.
        decode: token ids -> text; needed for stop strings.
    """
    ends = [index + 1 for index, token in enumerate(tokens) if token in config.end_token_ids][:1]
    if config.stop_strings:

        def stops(count: int) -> bool:
            text = decode(list(tokens[:count]))
            return any(stop in text for stop in config.stop_strings)

        if stops(len(tokens)):
            ends.append(bisect_left(range(len(tokens)), True, key=stops))
    return min(ends, default=None)


def ended_rows(tokens_BT: Tensor, settled_BT: Tensor, config: SamplerConfig, decode: Decode | None) -> Tensor:
    """Rows whose text has ended, bool [B].

    Args:
        tokens_BT: int64 canvas.
        settled_BT: bool, generated tokens that are there to stay and have no hole before them.
        config, decode: see ``text_end``.
    """
    if config.stop_strings:
        rows = zip(tokens_BT, settled_BT, strict=True)
        ends = [text_end(tokens_T[settled_T].tolist(), config, decode) for tokens_T, settled_T in rows]
        return torch.tensor([end is not None for end in ends], device=tokens_BT.device)
    end_ids = torch.tensor(config.end_token_ids, dtype=tokens_BT.dtype, device=tokens_BT.device)
    return (torch.isin(tokens_BT, end_ids) & settled_BT).any(dim=1)


def check_decode(config: SamplerConfig, decode: Decode | None) -> None:
    """Raise ValueError where stop strings cannot be found for want of a decoder."""
    if config.stop_strings and decode is None:
        raise ValueError(
            f"stop_strings={config.stop_strings!r} are looked for in text; give decode, a function from token ids to "
            "text, or use stop_token_ids"
        )
