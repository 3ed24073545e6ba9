"""From logits to what is proposed for each scored position.

Shape letters: N scored positions of all rows in row-major order, V vocabulary.
"""

import os
from collections.abc import Callable
from functools import cache, cached_property
from importlib.util import find_spec
from shutil import which

import torch
from torch import Tensor

from nemo_dllm.collections.diffusion.sampling.config import SamplerConfig
from nemo_dllm.collections.diffusion.sampling.remasking import Predictions
from nemo_dllm.collections.diffusion.sampling.token_choice import (
    choose_tokens,
    forbidden_tokens,
    only_forbids,
    restrict_logits,
    temper,
    token_columns,
)


class MostProbable(Predictions):
    """Predictions at temperature 0; all probabilities are worked out where a policy asks for them only.

    Args:
        tokens_N, draw_uniform_N: as of ``Predictions``.
        chosen_N: float32, the probability of each token.
        restricted: the logits, see ``restrict_logits``.
    """

    def __init__(
        self,
        tokens_N: Tensor,
        chosen_N: Tensor,
        restricted: Callable[[], Tensor],
        draw_uniform_N: Callable[[], Tensor],
    ):
        # Predictions are frozen.
        vars(self).update(tokens_N=tokens_N, draw_uniform_N=draw_uniform_N, _chosen_N=chosen_N, _restricted=restricted)

    @cached_property
    def probabilities_NV(self) -> Tensor:
        """See ``Predictions``."""
        return self._restricted().softmax(dim=-1)


def predict(
    logits_NV: Tensor,
    ordinals_N: Tensor | None,
    mask_token_id: int,
    config: SamplerConfig,
    draw_uniform: Callable[..., Tensor],
) -> Predictions:
    """Choose a token for each position.

    Args:
        logits_NV: as the model gives them.
        ordinals_N, mask_token_id: as of ``restrict_logits``.
        config: what tokens are allowed, and how they are chosen.
        draw_uniform: sizes -> fresh numbers in [0, 1), so many for each position; called where noise is needed.
    """

    def restricted() -> Tensor:
        return restrict_logits(logits_NV, ordinals_N, mask_token_id, config)

    unlikely_first = config.begin_suppress_token_ids if config.quirks.begin_suppress_by_confidence else ()
    if logits_NV.is_cuda and has_kernels() and not (config.temperature or config.tempered_confidence or unlikely_first):
        from nemo_dllm.collections.diffusion.kernels.most_probable import most_probable

        if only_forbids(config):
            forbidden = forbidden_tokens(mask_token_id, config)
            found = most_probable(logits_NV, token_columns(forbidden, logits_NV.shape[-1], logits_NV.device))
        else:
            found = most_probable(restricted())
        return MostProbable(*found, restricted, draw_uniform)
    allowed_NV = restricted()
    tokens_N = choose_tokens(allowed_NV, config, draw_uniform)
    confidence_NV = temper(allowed_NV, config).float() if config.tempered_confidence else allowed_NV
    if unlikely_first:
        suppressed_V = token_columns(unlikely_first, logits_NV.shape[-1], logits_NV.device)
        confidence_NV = confidence_NV.masked_fill(suppressed_V, -torch.inf)
    return Predictions(tokens_N, confidence_NV.softmax(dim=-1), draw_uniform)


@cache
def has_kernels() -> bool:
    """Whether there is Triton, which comes with torch for GPUs on most systems, and the compiler that it needs."""
    return find_spec("triton") is not None and any(map(which, (os.environ.get("CC", "cc"), "gcc", "clang")))
