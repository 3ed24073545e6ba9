"""Masked diffusion language models."""

from nemo_dllm.collections.diffusion.models.model import DiffusionModel


class MDLMModel(DiffusionModel):
    """A masked diffusion language model over any NeMo ``GPTConfig`` (Sahoo et al., 2024; Nie et al., 2025).

    ``MDLMModel(Qwen3Config1P7B(), MaskedDiffusion(mask_token_id=151669))``
    """
