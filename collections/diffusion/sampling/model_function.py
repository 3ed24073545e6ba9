"""What a sampler needs from a model: one function from tokens to logits, or an object that keeps keys and values.

Shape letters: B rows, T canvas positions, L positions of one pass, V vocabulary.
"""

from typing import Any, Protocol

from torch import Tensor


class DenoiserFn(Protocol):
    """A masked denoiser, seen as a function of the whole canvas.

    Position ids, caches and other inputs join as further keywords, each with a default on the model's side, so that a
    sampler which does not use them goes on calling the function as it does now.

    A model may have a method ``score_positions(tokens_BT, rows_N, positions_N, *, key_mask_BT)`` as well, which returns
    the logits [N, V] of the named entries alone: those of a whole canvas take more memory than the model. With an
    attribute ``vocabulary_size``, V, token ids outside of it are refused before they reach the model.

    A model that works apart from the CPU may have a method ``nearly_done()``, which returns when the last pass that it
    was given is about to end, a few tenths of a millisecond before. The sampler then warms up for the next one.
    """

    def __call__(self, tokens_BT: Tensor, *, key_mask_BT: Tensor | None) -> Tensor:
        """Score every token at every position.

        Args:
            tokens_BT: int64 token ids, holes hold the mask token.
            key_mask_BT: bool, True where a position may be attended to; None means everywhere.

        Returns:
            Unnormalised logits [B, T, V] in any floating dtype, on the device of ``tokens_BT``. Entry i scores position
            i, or position i + 1 for a checkpoint sampled with ``SamplerConfig.right_shift``.
        """
        ...


class CachedDenoiser(Protocol):
    """A masked denoiser that keeps keys and values by position, for the caches of ``SamplerConfig.cache``.

    A pass gets some positions of each row, ascending and padded on the right to the longest row; ``key_mask_BL`` is
    False at that padding, which must neither be attended to nor kept. A row without any True is idle: whatever its
    logits are, they are not read. ``KVCache`` does this bookkeeping for models that attend in plain torch.

    A model may have an attribute ``full_pass``: the positions, of all rows together, above which two passes over some
    each take no longer than one over all. A server then encodes prompts apart, which would only pad each other; without
    it, or with None, it encodes together those that come at once.
    """

    def new_cache(self, rows: int, positions: int) -> Any:
        """An empty cache for ``rows`` rows with positions 0 to ``positions`` - 1.

        The sampler only hands it back. With ``join_rows``, as ``KVCache`` has it, a server lets rows come and go; with
        ``suits`` too, those that stay are not moved.
        """
        ...

    def denoise(self, tokens_BL: Tensor, positions_BL: Tensor, cache: Any, *, key_mask_BL: Tensor) -> Tensor:
        """Score every token at the given positions, which attend to what the cache holds and to each other.

        Positions that the cache holds as well are replaced by the given ones in this pass. What later passes find in
        the cache at other positions does not change.

        Args:
            tokens_BL: int64 token ids, holes hold the mask token.
            positions_BL: int64 positions within the row's text, which rotary embeddings count.
            cache: from ``new_cache``.
            key_mask_BL: bool, False at padding.

        Returns:
            Logits as of ``DenoiserFn``, [B, L, V].
        """
        ...

    def commit(
        self, tokens_BL: Tensor, positions_BL: Tensor, cache: Any, *, key_mask_BL: Tensor, blocks_BL: Tensor
    ) -> Tensor:
        """Encode tokens and keep their keys and values, replacing what the cache holds at these positions.

        A position attends to what the cache holds at other positions, and to given ones of its own and earlier blocks.

        Args:
            tokens_BL, positions_BL, cache, key_mask_BL: as for ``denoise``.
            blocks_BL: int64, the block of each position; one number everywhere makes attention bidirectional.

        Returns:
            Logits [B, V] of the last given position of each row; they are read with ``right_shift`` only.
        """
        ...

    def score_and_keep(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        cache: Any,
        rows_N: Tensor,
        columns_N: Tensor,
        *,
        key_mask_BL: Tensor,
        kept_BL: Tensor,
    ) -> Tensor:
        """One pass as of ``denoise`` whose keys and values the cache keeps in part; for ``approximate_delayed`` only.

        Args:
            tokens_BL, positions_BL, cache, key_mask_BL: as for ``denoise``.
            rows_N, columns_N: int64, the entries of ``tokens_BL`` to score.
            kept_BL: bool, the positions whose keys and values later passes see, replacing what the cache holds.

        Returns:
            Logits [N, V] of the named entries.
        """
        ...


class JointDenoiser(CachedDenoiser, Protocol):
    """A ``CachedDenoiser`` that encodes a block for good and scores the next one in a single pass.

    An exact cache then takes a pass less for every block; models without this method give the same tokens.
    """

    def commit_and_score(
        self,
        tokens_BL: Tensor,
        positions_BL: Tensor,
        cache: Any,
        rows_N: Tensor,
        columns_N: Tensor,
        *,
        key_mask_BL: Tensor,
        blocks_BL: Tensor,
        kept_BL: Tensor,
    ) -> Tensor:
        """One pass as of ``commit`` of which the cache keeps some positions, all in blocks before the scored ones.

        Args:
            tokens_BL, positions_BL, cache, key_mask_BL, blocks_BL: as for ``commit``.
            rows_N, columns_N: int64, the entries of ``tokens_BL`` to score.
            kept_BL: bool, the positions whose keys and values later passes see.

        Returns:
            Logits [N, V] of the named entries.
        """
        ...
