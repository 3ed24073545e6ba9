"""Diffusion times of the samples of a run, drawn from (seed, sample index) alone.

A sample has one or more parts with a time each: its documents, or its blocks.

Suffixes: B samples, P parts of a sample (as many as the sample that has most).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.objectives.noise import even_spread, permutation, uniforms
from nemo_dllm.collections.diffusion.objectives.registry import look_up


class TimeSampling(NamedTuple):
    """How times are drawn."""

    stratified: bool
    """Evenly spaced over the samples of a group and the parts of a sample; else independent."""
    per_block: bool
    """A time per block; else per sequence (in packed rows: per document)."""


SEQUENCE_TIMES = {
    "antithetic": TimeSampling(stratified=True, per_block=False),
    "iid": TimeSampling(stratified=False, per_block=False),
    "per_sequence": TimeSampling(stratified=False, per_block=False),
}
BLOCK_TIMES = SEQUENCE_TIMES | {
    "antithetic_per_block": TimeSampling(stratified=True, per_block=True),
    "iid_per_block": TimeSampling(stratified=False, per_block=True),
}


def training_times(
    time_sampling: str,
    seed: int,
    sample_index_B: Tensor,
    parts_B: Tensor,
    *,
    group_size: int | None,
    time_range: tuple[float, float],
) -> Tensor:
    """Draw a time for each part of each sample: float32 [B, P] in ``time_range``, on the CPU.

    ``antithetic``: the ``group_size`` consecutive samples of a global batch take evenly spaced times with one common
    random offset, in random order, which lowers the variance of the loss (the low-discrepancy sampler of Kingma et al.
    2021, "Variational Diffusion Models"). With P parts each, all group_size * P times are evenly spaced, and so are
    those of each sample. ``iid``, also called ``per_sequence``: independent times. ``..._per_block`` only says what
    the parts are.

    Args:
        time_sampling: a name of ``BLOCK_TIMES``.
        seed: of the run.
        sample_index_B: int64 [B], positions in consumption order.
        parts_B: int64 [B], how many parts each sample has.
        group_size: samples that share strata; only stratified times need it.
        time_range: lowest and highest time.
    """
    if not look_up("time_sampling", time_sampling, BLOCK_TIMES).stratified:
        return _scale(uniforms(seed, sample_index_B, int(parts_B.max()), "time").double(), time_range)
    if group_size is None:
        raise ValueError(
            f"time_sampling={time_sampling!r} needs group_size (the global batch size in samples), which is None; "
            "set group_size, or an iid time_sampling"
        )
    sample_index_B = sample_index_B.cpu()
    groups, row_of_group_B = (sample_index_B // group_size).unique(return_inverse=True)
    offset_B = uniforms(seed, groups, 1, "time")[row_of_group_B, 0].double()
    stratum_B = permutation(seed, groups, group_size, "group")[row_of_group_B, sample_index_B % group_size]
    return _scale(_spread((stratum_B + offset_B) / group_size, seed, sample_index_B, parts_B, "part"), time_range)


def validation_times(seed: int, row_B: Tensor, parts_B: Tensor, *, time_range: tuple[float, float]) -> Tensor:
    """Draw a time for each part of each validation row: float32 [B, P] in ``time_range``.

    The rows are spread evenly over time whatever the batch size and ``time_sampling`` of the training run, so that a
    model has one validation loss, with little variance, comparable between runs.
    """
    return _scale(
        _spread(even_spread(seed, row_B, "validation_time"), seed, row_B, parts_B, "validation_part"), time_range
    )


def _spread(unit_B: Tensor, seed: int, sample_index_B: Tensor, parts_B: Tensor, stream: str) -> Tensor:
    """Divide [0, 1) into as many strata as a sample has parts, one for each in random order: float64 [B, P]."""
    draws_BP = uniforms(seed, sample_index_B, int(parts_B.max()), stream)
    # Draws of parts that a sample does not have come last.
    absent_BP = torch.arange(draws_BP.shape[1]) >= parts_B[:, None]
    stratum_BP = draws_BP.masked_fill(absent_BP, 2.0).argsort(dim=1, stable=True).argsort(dim=1)
    # Absent parts have no time, but schedules check that what they get is one.
    return ((stratum_BP + unit_B[:, None]) / parts_B[:, None]).masked_fill(absent_BP, 0.5)


def _scale(unit: Tensor, time_range: tuple[float, float]) -> Tensor:
    low, high = time_range
    return (low + (high - low) * unit).float()
