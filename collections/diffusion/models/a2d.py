"""Diffusion models that start from an autoregressive checkpoint."""

from nemo_dllm.collections.diffusion.models.model import DiffusionModel


class A2DModel(DiffusionModel):
    """An autoregressive checkpoint trained on as a diffusion model: same weights, bidirectional attention.

    Its importers read autoregressive checkpoints; everything else is as in :class:`MDLMModel`.
    """
