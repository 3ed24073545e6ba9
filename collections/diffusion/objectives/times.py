"""Diffusion times of the samples of a run, drawn from (seed, sample index) alone.

Suffix: B samples.
"""

from torch import Tensor

from nemo_dllm.collections.diffusion.objectives.noise import even_spread, permutation, uniforms
from nemo_dllm.collections.diffusion.objectives.registry import look_up

# time_sampling -> samples that share their strata; None: the objective's group_size.
TIME_SAMPLINGS: dict[str, int | None] = {"antithetic": None, "iid": 1, "per_sequence": 1}


def training_times(
    time_sampling: str, seed: int, sample_index_B: Tensor, *, group_size: int | None, time_epsilon: float
) -> Tensor:
    """Draw one time per sample: float32 [B] in [time_epsilon, 1].

    ``antithetic``: the ``group_size`` consecutive samples of a global batch take evenly spaced times with one common
    random offset, in random order, which lowers the variance of the loss (the low-discrepancy sampler of Kingma et al.
    2021, "Variational Diffusion Models"). ``iid``, also called ``per_sequence``: independent times, that is groups
    of one sample.
    """
    size = look_up("time_sampling", time_sampling, TIME_SAMPLINGS) or group_size
    if size is None:
        raise ValueError(
            f"time_sampling={time_sampling!r} needs group_size (the global batch size in samples), which is None; "
            "set group_size, or time_sampling='iid'"
        )
    sample_index_B = sample_index_B.cpu()
    groups, row_of_group_B = (sample_index_B // size).unique(return_inverse=True)
    offset_B = uniforms(seed, groups, 1, "time")[row_of_group_B, 0].double()
    stratum_B = permutation(seed, groups, size, "group")[row_of_group_B, sample_index_B % size]
    return _scale((stratum_B + offset_B) / size, time_epsilon)


def validation_times(seed: int, row_B: Tensor, *, time_epsilon: float) -> Tensor:
    """Draw one time per validation row: float32 [B] in [time_epsilon, 1].

    The rows are spread evenly over time whatever the batch size and ``time_sampling`` of the training run, so that a
    model has one validation loss, with little variance, comparable between runs.
    """
    return _scale(even_spread(seed, row_B, "validation_time"), time_epsilon)


def _scale(unit_B: Tensor, time_epsilon: float) -> Tensor:
    return (time_epsilon + (1 - time_epsilon) * unit_B).float()
