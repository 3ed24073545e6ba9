"""Block diffusion language models."""

from nemo_dllm.collections.diffusion.models.model import DiffusionModel


class BD3LMModel(DiffusionModel):
    """A block diffusion language model over any NeMo ``GPTConfig`` (Arriola et al., 2025).

    ``BD3LMModel(SDARConfig4B(), BlockDiffusion(mask_token_id=151669, block_size=4))``
    """
