"""Masked diffusion over the whole sequence."""

from dataclasses import dataclass

from nemo_dllm.collections.diffusion.objectives.absorbing import AbsorbingDiffusion


@dataclass
class MaskedDiffusion(AbsorbingDiffusion):
    """Masked diffusion with a time per sequence (Sahoo et al. 2024, equation 10), in packed rows per document.

    ``time_sampling`` is ``antithetic``, or ``iid`` (alias ``per_sequence``). All other fields: see
    :class:`AbsorbingDiffusion`.
    """
