"""Where a text ends: at an end token, or where a stop string is complete.

Shape letters: B rows, T canvas positions.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from copy import copy

import numpy
import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.joining import Picked

Decode = Callable[[list[int]], str]


def text_end(tokens: Sequence[int], config: SamplerConfig, decode: Decode | None) -> int | None:
    """Tokens up to the end of a text, what ends it included; None where nothing does.

    Args:
        tokens: generated ones, in order.
        config: end tokens and stop strings are read.
        decode: token ids -> text; needed for stop strings.
    """
    end_ids = config.end_token_ids
    ends = [index + 1 for index, token in enumerate(tokens) if token in end_ids][:1]
    if config.stop_strings:

        def stops(count: int) -> bool:
            text = decode(list(tokens[:count]))
            return any(stop in text for stop in config.stop_strings)

        if stops(len(tokens)):
            ends.append(bisect_left(range(len(tokens)), True, key=stops))
    return min(ends, default=None)


def first_ends(
    tokens_N: numpy.ndarray, holes_N: numpy.ndarray, generated: Sequence[Sequence[int]], end_ids: Collection[int]
) -> dict[int, int]:
    """The first end token among generated places, by row; rows without one are not there.

    Args:
        tokens_N, holes_N: a canvas, row after row.
        generated: by row, places to look at, ascending.
        end_ids: tokens that end a text.
    """
    ends = ((place for place in row if not holes_N[place] and int(tokens_N[place]) in end_ids) for row in generated)
    firsts = enumerate(next(places, None) for places in ends)
    return {row: place for row, place in firsts if place is not None}


class TextEnds:
    """Finds the rows of a run whose text has ended.

    Args:
        config: end tokens and stop strings are read.
        decode: token ids -> text; needed for stop strings.

    Raises:
        ValueError: there are stop strings and no way to find them.
    """

    def __init__(self, config: SamplerConfig, decode: Decode | None):
        if config.stop_strings and decode is None:
            raise ValueError(
                f"stop_strings={config.stop_strings!r} are looked for in text; give decode, a function from token ids "
                "to text, or use stop_token_ids"
            )
        self._config, self._decode = config, decode
        self._end_ids = torch.tensor(config.end_token_ids, dtype=torch.int64, device="cpu")
        self._by_length: list[tuple[int, bool]] = []

    @classmethod
    def join_rows(cls, picked: Sequence[Picked]) -> "TextEnds":
        """For rows of several runs; what has been looked at is not looked at again."""
        joined = copy(picked[0].part)
        joined._by_length = [
            ends._by_length[row] if ends._by_length else (0, False) for ends, rows in picked for row in rows
        ]
        return joined

    def ended(self, tokens_BT: Tensor, settled_BT: Tensor) -> list[bool]:
        """Which rows have ended.

        Args:
            tokens_BT: int64 canvas, on the CPU.
            settled_BT: bool, generated tokens that are there to stay and have no hole before them.
        """
        if not self._config.stop_strings:
            return (torch.isin(tokens_BT, self._end_ids) & settled_BT).any(dim=1).tolist()
        counts = settled_BT.sum(dim=1).tolist()
        known = self._by_length or [(0, False)] * len(counts)
        # Decoding is slow: a row is looked at again when it has grown.
        self._by_length = [
            before if count == before[0] else (count, self._has_end(tokens_T[settled_T]))
            for tokens_T, settled_T, count, before in zip(tokens_BT, settled_BT, counts, known, strict=True)
        ]
        return [has_end for _, has_end in self._by_length]

    def _has_end(self, tokens_T: Tensor) -> bool:
        return text_end(tokens_T.tolist(), self._config, self._decode) is not None
