"""Settings of a sampling run."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from nemo_dllm.collections.diffusion.sampling.remasking import REMASKING_POLICIES
from nemo_dllm.collections.diffusion.sampling.transfer import Alpha, linear_alpha


@dataclass(frozen=True)
class SamplerConfig:
    """How masked positions are filled.

    Attributes:
        max_new_tokens: tokens generated after each prompt, at least 1. Infilling takes its length from the holes.
        steps: denoising steps per row, 1 to max_new_tokens, split evenly over the row's blocks and rounded up. None
            commits one token per step.
        block_size: positions per semi-autoregressive block, counted from the end of the prompt (when infilling: from
            the first hole); a block starts when the one before it is full. None is one block for all.
        temperature: 0 takes the most probable token, 1 samples from the model's distribution.
        top_p: probability mass to sample from, in (0, 1], after temperature; None is all.
        top_k: number of tokens to sample from, at least 1, after temperature; None is all.
        remasking: which predictions are committed first, a name in ``REMASKING_POLICIES``. Ties go to the lowest
            position.
        threshold: commit every position whose chosen token has a probability above this (before temperature, in
            float32), and the best one by ``remasking`` in any case; at least 0. It sets the pace instead of ``steps``.
        right_shift: True if the logits at position i score position i + 1, as in models converted from autoregressive
            ones. Position 0 has no left neighbour and uses its own logits.
        eos_token_id: the token that ends a text, or None.
        stop_at_eos: finish a row once an end token has no hole before it, and cut the completion after that token.
        suppress_token_ids: tokens that are never chosen. The mask token never is.
        seed: seed of the run's noise; None draws one from torch's global generator.
        alpha: noise schedule, float32 times in [0, 1] -> share of clean tokens; shapes the pace of explicit ``steps``.
    """

    max_new_tokens: int = 128
    steps: int | None = None
    block_size: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    remasking: str = "confidence"
    threshold: float | None = None
    right_shift: bool = False
    eos_token_id: int | None = None
    stop_at_eos: bool = True
    suppress_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    alpha: Alpha = linear_alpha

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(problem)

    def _problems(self) -> Iterator[str]:
        if self.max_new_tokens < 1:
            yield f"max_new_tokens={self.max_new_tokens} must be at least 1"
        if self.steps is not None and not 1 <= self.steps <= self.max_new_tokens:
            yield (
                f"steps={self.steps} must be from 1 to max_new_tokens={self.max_new_tokens}, since every step commits "
                "a token; leave it None for one step per token"
            )
        if self.block_size is not None and self.block_size < 1:
            yield f"block_size={self.block_size} must be at least 1; leave it None for one block over all positions"
        if not (self.temperature >= 0 and isfinite(self.temperature)):
            yield f"temperature={self.temperature} must be a finite number of at least 0"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f"top_p={self.top_p} must be above 0 and at most 1; leave it None to sample from all tokens"
        if self.top_k is not None and self.top_k < 1:
            yield f"top_k={self.top_k} must be at least 1; leave it None to sample from all tokens"
        if self.remasking not in REMASKING_POLICIES:
            yield f"remasking={self.remasking!r} is unknown; known: {', '.join(sorted(REMASKING_POLICIES))}"
        if self.threshold is not None and not self.threshold >= 0:
            yield f"threshold={self.threshold} must be at least 0, it is compared with a probability"
        if self.threshold is not None and self.steps is not None:
            yield (
                f"threshold={self.threshold} sets how many tokens a step commits, so steps={self.steps} would have no "
                "effect; leave one of them None"
            )
