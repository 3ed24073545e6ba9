"""A checkpoint seen with more tokens than its embedding table has rows: what an added mask token needs.

Shape letters: R rows, H hidden size.
"""

import zlib
from collections.abc import Collection

import torch
from torch import Tensor

from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.family import Family
from nemo_dllm.connectors.key_table import KeyTable, VocabularyRows

MASK_INITS = ("mean", "random", "zero")

# Of "mean", relative to the table's standard deviation: rows that start equal would stay equal.
_NOISE = 0.02
_ROWS_AT_ONCE = 8192


def check_mask_init(mask_init: str) -> None:
    """Raise ``ValueError`` for an unknown way to make new rows."""
    if mask_init not in MASK_INITS:
        raise ValueError(f"mask_init={mask_init!r} is unknown; choose from {', '.join(MASK_INITS)}")


class GrownCheckpoint:
    """An :class:`HFCheckpoint` whose vocabulary tables have rows of their own behind those of the file.

    The rows depend on the table alone, so all ranks make the same ones.

    Args:
        checkpoint: what is read.
        config: its config.json with the larger vocabulary.
        tables: names of the tensors with a row per token.
        vocab_size: rows that they get.
        mask_init: of the new rows: ``mean`` (of the table's rows, with noise of 2 % of its standard deviation),
            ``random`` (normal with the table's standard deviation) or ``zero``.

    Raises:
        ValueError: for an unknown ``mask_init``.
    """

    def __init__(
        self, checkpoint: HFCheckpoint, config: dict, tables: Collection[str], vocab_size: int, mask_init: str
    ):
        check_mask_init(mask_init)
        self.path = checkpoint.path
        self.config = config
        self.shapes, self.dtypes = dict(checkpoint.shapes), checkpoint.dtypes
        self._checkpoint = checkpoint
        self._mask_init = mask_init
        self._new_rows: dict[str, Tensor] = {}
        for name in tables:
            if name in self.shapes and self.shapes[name][0] < vocab_size:
                self.shapes[name] = (vocab_size, *self.shapes[name][1:])

    def keys(self) -> list[str]:
        """Names of all tensors, sorted."""
        return list(self.shapes)

    def tensor(self, name: str, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """See :meth:`HFCheckpoint.tensor`."""
        if self.shapes[name] == self._checkpoint.shapes[name]:
            return self._checkpoint.tensor(name, rows, columns)
        stored = self._checkpoint.shapes[name][0]
        start, stop, _ = rows.indices(self.shapes[name][0])
        parts = []
        if start < stored:
            parts.append(self._checkpoint.tensor(name, slice(start, min(stop, stored)), columns))
        if stop > stored:
            new_rows_RH = self._new(name)[max(start, stored) - stored : stop - stored, columns]
            parts.append(new_rows_RH)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _new(self, name: str) -> Tensor:
        if name not in self._new_rows:
            self._new_rows[name] = self._make(name)
        return self._new_rows[name]

    def _make(self, name: str) -> Tensor:
        stored, width = self._checkpoint.shapes[name]
        count = self.shapes[name][0] - stored
        mean_H, std, dtype = self._statistics(name)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        noise_RH = torch.randn(count, width, generator=generator, dtype=torch.float64)
        rows_RH = {
            "mean": mean_H + _NOISE * std * noise_RH,
            "random": std * noise_RH,
            "zero": torch.zeros_like(noise_RH),
        }[self._mask_init]
        return rows_RH.to(dtype)

    def _statistics(self, name: str) -> tuple[Tensor, Tensor, torch.dtype]:
        """Mean row and standard deviation of all entries of a table, in fp64, and its dtype."""
        stored, width = self._checkpoint.shapes[name]
        sum_H, squares, dtype = torch.zeros(width, dtype=torch.float64), 0.0, None
        for start in range(0, stored, _ROWS_AT_ONCE):
            rows_RH = self._checkpoint.tensor(name, slice(start, min(start + _ROWS_AT_ONCE, stored)))
            dtype = rows_RH.dtype
            sum_H += rows_RH.double().sum(0)
            squares += rows_RH.double().square().sum()
        count = stored * width
        return sum_H / stored, (squares / count - (sum_H.sum() / count) ** 2).sqrt(), dtype


def grow_vocabulary(
    checkpoint: HFCheckpoint, family: Family, table: KeyTable, vocab_size: int, mask_init: str
) -> HFCheckpoint | GrownCheckpoint:
    """The checkpoint itself where it has that many tokens, else one with the rows that it lacks.

    Args:
        checkpoint: what is read.
        family: its family.
        table: key table of the model.
        vocab_size: tokens of the model.
        mask_init: see :class:`GrownCheckpoint`.
    """
    if family.vocab_size(checkpoint.config) >= vocab_size:
        return checkpoint
    config = {**checkpoint.config, **dict.fromkeys(vocabulary_fields(family), vocab_size)}
    return GrownCheckpoint(checkpoint, config, vocabulary_tables(table), vocab_size, mask_init)


def vocabulary_fields(family: Family) -> list[str]:
    """Fields of the family's config.json that name the number of tokens."""
    return [field.hf for field in family.config.fields if field.nemo == "vocab_size"]


def vocabulary_tables(table: KeyTable) -> list[str]:
    """Tensors with a row per token: embedding and, untied, head."""
    return [name for entry in table.entries() if isinstance(entry.layout, VocabularyRows) for name in entry.hf]
