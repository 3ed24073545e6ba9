"""Settings of a sampling run."""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, NamedTuple

from nemo_dllm.collections.diffusion.sampling.blocks import BLOCK_ORIGINS
from nemo_dllm.collections.diffusion.sampling.quirks import ReferenceQuirks
from nemo_dllm.collections.diffusion.sampling.remasking import REMASKING_POLICIES
from nemo_dllm.collections.diffusion.sampling.transfer import SCHEDULES
from nemo_dllm.collections.diffusion.setting_types import of_type

DELAYED = "approximate_delayed"
LARGEST_CFG_SCALE = 1_000_000
"""Times the difference of two logits of any model it stays far inside float32, where infinity times 0 would be NaN."""
CACHES = ("exact", "approximate_prefix", "approximate_dual", DELAYED)


@dataclass(frozen=True)
class SamplerConfig:
    """How masked positions are filled.

    Attributes:
        max_new_tokens: tokens generated after each prompt, at least 1. Infilling takes its length from the holes.
        max_length: longest row in tokens, prompt included; a row gets fewer new tokens where it would be longer. None
            is no limit.
        min_new_tokens: the first so many generated tokens are no end tokens.
        steps: denoising steps per row, 1 to max_new_tokens, split evenly over the row's blocks and rounded up. None
            commits one token per step.
        steps_per_block: denoising steps per block, in place of steps, 1 to block_size.
        schedule: how steps are divided, a name in ``SCHEDULES``: linear and cosine follow the reverse process of that
            noise, even splits evenly, even_block splits the block's length although part of it may be given.
        block_size: positions per semi-autoregressive block; a block starts when the one before it is full. None is one
            block for all.
        block_origin: where blocks are counted from: prompt is the end of the prompt (when infilling: the first hole),
            sequence the start of the row. None is sequence with an exact cache, whose model learnt its blocks so, and
            prompt otherwise.
        cache: exact keeps keys and values of finished blocks, for block-causal models, where it changes no result.
            approximate_prefix and approximate_dual are for bidirectional ones: within a block they reuse the keys and
            values that the text before it, or around it, had when the block began (Wu et al. 2025, Fast-dLLM).
            approximate_delayed, also for bidirectional ones and without blocks too, reuses those that a token had in
            the step after the one that chose it (Ma et al. 2025, dKV-Cache). None keeps nothing.
        refresh_interval: with approximate_delayed, every so many steps of a row all of it is encoded anew, at least 1,
            which is as exact as no cache.
        temperature: 0 takes the most probable token, 1 samples from the model's distribution.
        top_p: probability mass to sample from, in (0, 1], after temperature; None is all.
        top_k: number of tokens to sample from, at least 1, after temperature; None is all.
        remasking: which predictions are committed first, a name in ``REMASKING_POLICIES``. Ties go to the lowest
            position.
        remasking_temperature: 0 commits the best scores; above, positions are drawn without replacement with weights
            exp(score / remasking_temperature).
        tempered_confidence: compare probabilities after temperature, top_k and top_p instead of the model's own. At low
            temperatures they round to 1, and the order becomes left to right.
        threshold: commit every position whose chosen token has a probability above this (before temperature, in
            float32), and the best one by remasking in any case; at least 0. With steps, at least the scheduled number.
        factor: commit the n most confident positions, n the largest number with (n + 1) * (1 - confidence) of at most
            this for all of them (Fast-dLLM), and the best one in any case; above 0. With steps as threshold.
        editing_threshold: replace a generated token of the block at hand where another one is chosen with a
            probability above this; in [0, 1]. None never edits (LLaDA2.1).
        max_post_steps: steps that a full block gets for edits, at least 0; it ends earlier when nothing changes.
        cfg_scale: classifier-free guidance: logits are u + (cfg_scale + 1) * (c - u), u with the given tokens masked;
            from 0, which is no guidance, to 1000000.
        cfg_keep_token_ids: given tokens that stay visible in u.
        right_shift: True if the logits at position i score position i + 1, as in models converted from autoregressive
            ones. Position 0 has no left neighbour and uses its own logits.
        bos_token_id: starts rows whose prompt is empty. None leaves them empty, which right_shift does not allow.
        eos_token_id: the token that ends a text, or None.
        eos_penalty: subtracted from the logit of the end token, in nats, against answers that end at once.
        stop_at_eos: finish a row once an end token has no hole before it, and cut the completion after that token.
        stop_token_ids: further end tokens.
        stop_strings: texts that end a row as well; its completion is cut after the token that completes one. They need
            a ``decode`` function, and eos_token_id or stop_token_ids to fill the row with.
        suppress_token_ids: tokens that are never chosen. The mask token never is.
        begin_suppress_token_ids: tokens that are not chosen as the first one of a completion.
        seed: seed of the run's noise; None draws one from torch's global generator.
        quirks: faults of a reference to repeat; none by default.
    """

    max_new_tokens: int = 128
    max_length: int | None = None
    min_new_tokens: int = 0
    steps: int | None = None
    steps_per_block: int | None = None
    schedule: str = "linear"
    block_size: int | None = None
    block_origin: str | None = None
    cache: str | None = None
    refresh_interval: int = 8
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    remasking: str = "confidence"
    remasking_temperature: float = 0.0
    tempered_confidence: bool = False
    threshold: float | None = None
    factor: float | None = None
    editing_threshold: float | None = None
    max_post_steps: int = 16
    cfg_scale: float = 0.0
    cfg_keep_token_ids: tuple[int, ...] = ()
    right_shift: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    eos_penalty: float = 0.0
    stop_at_eos: bool = True
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    suppress_token_ids: tuple[int, ...] = ()
    begin_suppress_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    quirks: ReferenceQuirks = ReferenceQuirks()

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is not ReferenceQuirks:
                object.__setattr__(self, field.name, of_type(field.name, getattr(self, field.name), field.type))
        for rule in _RULES:
            value = getattr(self, rule.field)
            if value is not None and not rule.holds(value, self):
                raise ValueError(f"{rule.field}={value!r} {rule.otherwise.format(c=self, **_KNOWN)}")

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, the one that fills ended rows first."""
        eos = (self.eos_token_id,) if self.stop_at_eos and self.eos_token_id is not None else ()
        return (*eos, *self.stop_token_ids)

    @property
    def counts_blocks_from(self) -> str:
        """``block_origin`` with None resolved."""
        return self.block_origin or ("sequence" if self.cache == "exact" else "prompt")


class _Rule(NamedTuple):
    """What a field has to be where it is not None; ``otherwise`` is the end of the error."""

    field: str
    holds: Callable[[Any, SamplerConfig], bool]
    otherwise: str


class _Names:
    """Formats as the names of a table, when the error is raised: tables grow."""

    def __init__(self, table):
        self._table = table

    def __format__(self, spec: str) -> str:
        return ", ".join(sorted(self._table))


_KNOWN = {
    "caches": _Names(CACHES),
    "origins": _Names(BLOCK_ORIGINS),
    "policies": _Names(REMASKING_POLICIES),
    "schedules": _Names(SCHEDULES),
}


def _at_least(bound: float) -> Callable[[float, SamplerConfig], bool]:
    return lambda value, _: value >= bound


def _finite_from_0(value: float, _: SamplerConfig) -> bool:
    return value >= 0 and isfinite(value)


_RULES = (
    _Rule("max_new_tokens", _at_least(1), "must be at least 1"),
    _Rule("max_length", _at_least(1), "must be at least 1; leave it None for no limit"),
    _Rule(
        "min_new_tokens",
        lambda n, c: 0 <= n <= c.max_new_tokens,
        "must be from 0 to max_new_tokens={c.max_new_tokens}",
    ),
    _Rule(
        "steps",
        lambda n, c: 1 <= n <= c.max_new_tokens,
        "must be from 1 to max_new_tokens={c.max_new_tokens}, since every step commits a token; leave it None for one "
        "step per token",
    ),
    _Rule(
        "block_size",
        _at_least(1),
        "must be at least 1; leave it None for one block over all positions",
    ),
    _Rule(
        "steps_per_block",
        lambda n, c: 1 <= n <= (c.block_size or c.max_new_tokens),
        "must be from 1 to the positions of a block (block_size={c.block_size}), since every step commits a token; "
        "leave it None for one step per token",
    ),
    _Rule(
        "steps_per_block", lambda n, c: c.steps is None, "stands in place of steps={c.steps}; leave one of them None"
    ),
    _Rule("schedule", lambda name, _: name in SCHEDULES, "is unknown; known: {schedules}"),
    _Rule("block_origin", lambda name, _: name in BLOCK_ORIGINS, "is unknown; known: {origins}"),
    _Rule("cache", lambda name, _: name in CACHES, "is unknown; known: {caches}; leave it None for no cache"),
    _Rule("cache", lambda name, c: c.block_size is not None or name == DELAYED, "works block by block; set block_size"),
    _Rule("refresh_interval", _at_least(1), "must be at least 1, which encodes everything at every step"),
    _Rule("temperature", _finite_from_0, "must be a finite number of at least 0"),
    _Rule("top_p", lambda p, _: 0 < p <= 1, "must be above 0 and at most 1; leave it None to sample from all tokens"),
    _Rule("top_k", _at_least(1), "must be at least 1; leave it None to sample from all tokens"),
    _Rule("remasking", lambda name, _: name in REMASKING_POLICIES, "is unknown; known: {policies}"),
    _Rule("remasking_temperature", _finite_from_0, "must be a finite number of at least 0"),
    _Rule("threshold", _at_least(0), "must be at least 0, it is compared with a probability"),
    _Rule("factor", lambda f, _: f > 0 and isfinite(f), "must be a finite number above 0; leave it None for no factor"),
    _Rule(
        "factor",
        lambda _, c: c.threshold is None,
        "and threshold={c.threshold} both set how many tokens a step commits; leave one of them None",
    ),
    _Rule(
        "editing_threshold",
        lambda p, _: 0 <= p <= 1,
        "must be from 0 to 1, it is compared with a probability; leave it None to edit nothing",
    ),
    _Rule("max_post_steps", _at_least(0), "must be at least 0"),
    _Rule(
        "cfg_scale",
        lambda scale, _: 0 <= scale <= LARGEST_CFG_SCALE,
        f"must be a finite number of at least 0, which is no guidance, and at most {LARGEST_CFG_SCALE}",
    ),
    _Rule("eos_penalty", _finite_from_0, "must be a finite number of at least 0"),
    _Rule(
        "stop_strings",
        lambda texts, c: not texts or bool(c.end_token_ids),
        "need a token to fill an ended row with; set eos_token_id or stop_token_ids",
    ),
    _Rule("stop_strings", lambda texts, _: "" not in texts, "hold an empty text, which ends everything; take it out"),
    _Rule(
        "quirks",
        lambda q, c: c.steps or c.steps_per_block or not (q.mask_token_allowed or q.stray_masks_compete),
        "can leave holes for ever without a schedule; set steps or steps_per_block",
    ),
    _Rule(
        "quirks",
        lambda q, c: c.eos_token_id is not None or not q.stop_after_block,
        "with stop_after_block need the token that ends a text; set eos_token_id",
    ),
    _Rule(
        "quirks",
        lambda q, c: c.cache is None or not q.stray_masks_compete,
        "with stray_masks_compete need the whole canvas in every pass; leave cache None",
    ),
)


def settings_of_gaps(settings: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Fields for infilling, where gaps are the length: ``max_new_tokens`` is that, or what the others need it to be.

    More steps than tokens are no mistake here: steps end with the last hole.

    Args:
        settings: further fields of ``SamplerConfig``.
        tokens: of all gaps together.
    """
    counts = [settings.get(name) for name in ("steps", "steps_per_block", "min_new_tokens")]
    return {**settings, "max_new_tokens": max([tokens, *(count for count in counts if isinstance(count, int))])}


class SamplerField(NamedTuple):
    """One setting, for interfaces that are generated from ``SamplerConfig``.

    Attributes:
        name: of the field.
        type: its annotation.
        default: what it is if nothing is said.
        help: what it does, one paragraph without markup.
    """

    name: str
    type: Any
    default: Any
    help: str


def sampler_fields() -> dict[str, SamplerField]:
    """Every setting that a user may give, by name, with the text that documents it; quirks are left out."""
    attributes = inspect.cleandoc(SamplerConfig.__doc__).split("Attributes:\n", 1)[1]
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE)
    texts = {name: " ".join(text.replace("``", "").split()) for name, text in entries}
    return {
        field.name: SamplerField(field.name, field.type, field.default, texts[field.name])
        for field in fields(SamplerConfig)
        if field.name != "quirks"
    }
