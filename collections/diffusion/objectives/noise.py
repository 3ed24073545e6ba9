"""Random numbers as a pure function of (seed, index, stream), the same on every machine and in every layout.

Each (seed, index) is a key of the counter-based generator Philox4x64-10 (Salmon et al. 2011, "Parallel Random
Numbers: As Easy as 1, 2, 3"), and the stream sits in the top word of its counter. Nothing is carried from call to
call, so batch composition, micro-batch size, parallel layout and resumption cannot change a draw, and peers that
share a sample agree without communication. Only numpy's raw words are used: its distributions may change between
versions, its bit streams do not.

Suffixes: B samples, L draws of one sample, G groups of samples, S members of a group.
"""

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor

from nemo_dllm.collections.diffusion.objectives.registry import look_up

# What a draw is for -> top counter word. Reordering would change the noise of every run.
STREAMS = {
    "time": 0,  # offset shared by the diffusion times of a group; keyed by group
    "mask": 1,  # uniforms compared with the mask rate; keyed by sample
    "validation_time": 2,  # offset of all validation times
    "validation_mask": 3,  # as mask; keyed by validation row
    "group": 4,  # order of the time strata in a group; keyed by group
    "part": 5,  # order of the time strata of a sample's parts; keyed by sample
    "validation_part": 6,  # as part; keyed by validation row
}

# 2**64 divided by the golden ratio: multiples of it, modulo 2**64, fill the range evenly at every length.
_GOLDEN_STEP = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seed: int, sample_index_B: Tensor, length: int, stream: str) -> Tensor:
    """Draw ``length`` uniforms per sample: float32 [B, length] on the CPU, multiples of 2**-24 in [0, 1).

    Args:
        seed: of the run, in [0, 2**64).
        sample_index_B: int64 [B], not negative; read on the CPU, so a GPU tensor would synchronise.
        length: draws per sample. A longer call starts with the draws of a shorter one.
        stream: a name of ``STREAMS``; streams are independent.
    """
    words_BL = _words(seed, sample_index_B.tolist(), length, stream)
    return torch.from_numpy((words_BL >> np.uint64(40)).astype(np.float32) * np.float32(2**-24))


def permutation(seed: int, group_index_G: Tensor, size: int, stream: str) -> Tensor:
    """Draw one permutation of 0 .. size-1 per group: int64 [G, size] on the CPU. Arguments as in ``uniforms``."""
    words_GS = _words(seed, group_index_G.tolist(), size, stream)
    return torch.from_numpy(np.argsort(words_GS, axis=1, kind="stable"))


def even_spread(seed: int, sample_index_B: Tensor, stream: str) -> Tensor:
    """Spread samples 0, 1, 2, ... evenly over [0, 1), however many there are: float64 [B].

    Index i stands at (offset + i / golden ratio) modulo 1 with an offset drawn from the seed (a Kronecker sequence):
    one index is uniform over the seeds, and the first n indices leave no gap much wider than 1/n.
    """
    indices = sample_index_B.tolist()
    _check("index", min(indices, default=0))
    offset = _words(seed, [0], 1, stream)[0, 0]
    position_B = offset + np.array(indices, dtype=np.uint64) * _GOLDEN_STEP
    return torch.from_numpy((position_B >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _words(seed: int, indices: list[int], length: int, stream: str) -> np.ndarray:
    _check("seed", seed)
    _check("index", min(indices, default=0))
    counter = np.array([0, 0, 0, look_up("stream", stream, STREAMS)], dtype=np.uint64)
    generator = Philox(key=0)
    # One generator, given a new key for each index: building one takes longer than its draws.
    state = generator.state
    words = np.empty((len(indices), length), dtype=np.uint64)
    for row, index in enumerate(indices):
        state["state"] = {"counter": counter, "key": np.array([seed, index], dtype=np.uint64)}
        generator.state = state
        words[row] = generator.random_raw(length)
    return words


def _check(name: str, value: int) -> None:
    if not 0 <= value < 2**64:
        raise ValueError(f"{name}={value} is outside [0, 2**64)")
