"""A checkpoint as the function that samplers call.

Shape letters: B rows, T positions, V vocabulary.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from torch import Tensor

from nemo_dllm.collections.diffusion.inference.locate import CheckpointKind, locate_checkpoint
from nemo_dllm.collections.diffusion.models.core import DiffusionCore
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
from nemo_dllm.collections.diffusion.sampling import SamplerConfig, preset_fields
from nemo_dllm.collections.diffusion.single_process import start_single_process
from nemo_dllm.connectors.build import build_on_cpu
from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.facts import read_facts, weights_dtype
from nemo_dllm.connectors.families import find_family
from nemo_dllm.connectors.hf_export import load_nemo_checkpoint
from nemo_dllm.connectors.load import load_hf_weights
from nemo_dllm.connectors.mask_token import mask_token_at
from nemo_dllm.connectors.nemo_tokenizer import nemo_tokenizer
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model to sample from, with what its checkpoint says about it.

    Attributes:
        core: the Megatron model, whole, in evaluation mode.
        tokenizer: NeMo's tokenizer of the checkpoint; None where it has none.
        mask_token_id: token shown at positions to fill.
        right_shift: whether the logits at position i score position i + 1.
    """

    core: DiffusionCore
    tokenizer: TokenizerSpec | None
    mask_token_id: int
    right_shift: bool

    @torch.no_grad()
    def denoiser(self, tokens_BT: Tensor, *, key_mask_BT: Tensor | None = None) -> Tensor:
        """Score every token at every position; a ``sampling.DenoiserFn``.

        Args:
            tokens_BT: int64 on ``device``, the mask token where unknown.
            key_mask_BT: bool, True where a position may be attended to; None means everywhere.

        Returns:
            Logits [B, T, V] over the tokens, without padding rows, in the model's dtype.
        """
        return self.core(tokens_BT, attention_mask=key_mask_BT)

    @property
    def config(self) -> TransformerConfig:
        """NeMo's configuration of the model."""
        return self.core.config

    @property
    def seq_length(self) -> int:
        """Tokens of the longest sample in training."""
        return self.config.seq_length

    @property
    def device(self) -> torch.device:
        """Where the weights are, and inputs have to be."""
        return next(self.core.parameters()).device

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without added special tokens.

        Raises:
            ValueError: where the checkpoint has no tokenizer.
        """
        return self._text_tokenizer().text_to_ids(text)

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, without special tokens.

        Raises:
            ValueError: where the checkpoint has no tokenizer.
        """
        return self._text_tokenizer().ids_to_text(token_ids)

    def sampler_config(self, preset: str | None = None, **settings: Any) -> SamplerConfig:
        """Sampler settings with what the checkpoint decides: shift, start and end token, and ids that are no text.

        A start token is set where an empty prompt needs one, which is with the shift.

        Args:
            preset: a name in ``sampling.PRESETS``, whose fields the checkpoint's win over; None is none.
            settings: further fields of ``SamplerConfig``, which win over both.
        """
        num_tokens = self.core.logical_vocab_size
        num_texts = num_tokens if self.tokenizer is None else self.tokenizer.vocab_size
        of_checkpoint = {
            "right_shift": self.right_shift,
            "bos_token_id": getattr(self.tokenizer, "bos_id", None) if self.right_shift else None,
            "eos_token_id": getattr(self.tokenizer, "eos_id", None),
            "suppress_token_ids": tuple(range(num_texts, num_tokens)),
        }
        of_preset = {} if preset is None else preset_fields(preset)
        return SamplerConfig(**(of_preset | of_checkpoint | settings))

    def _text_tokenizer(self) -> TokenizerSpec:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer, so there is no text; use token ids and `denoiser`")
        return self.tokenizer


def load_checkpoint(path: str | Path, *, best: bool = False) -> LoadedModel:
    """Load a model for sampling, on the GPU where there is one.

    It has the dtype of its checkpoint; on the CPU it is fp32, where half precision is slower and not everywhere
    supported. Megatron's parallel state over this process stays until the process ends.

    Args:
        path, best: see :func:`locate_checkpoint`. A Hugging Face checkpoint must be one of a diffusion model.

    Raises:
        FileNotFoundError, ValueError: see :func:`locate_checkpoint`.
        ValueError: where the checkpoint holds no diffusion model, or there is no mask token.
    """
    checkpoint = locate_checkpoint(path, best=best)
    start_single_process()
    load = load_nemo_checkpoint if checkpoint.kind is CheckpointKind.NEMO else _load_hf_checkpoint
    model = load(checkpoint.path)
    core = model.module.eval()
    if torch.cuda.is_available():
        core.cuda()
    else:
        core.float()
        core.config.params_dtype = torch.float32
    return LoadedModel(core, model.tokenizer, model.objective.mask_token_id, model.objective.right_shift)


def _load_hf_checkpoint(path: Path) -> DiffusionModel:
    facts = read_facts(path)
    if facts.attention != "bidirectional":
        raise ValueError(
            f"{path} is a model with {facts.attention} attention, not a masked diffusion model; import it and train it "
            "as one (nemo-dllm recipes lists how)"
        )
    if facts.mask_token_id is None:
        raise ValueError(f"{path} has no mask token; set mask_token_id in its config.json to the id of the mask token")
    checkpoint = HFCheckpoint(path)
    mask_token = mask_token_at(
        facts.mask_token_id, load_hf_tokenizer(path), checkpoint.config, find_family(checkpoint.config)
    )
    config = hf_to_nemo_config(path)
    config.seq_length = getattr(config, "max_position_embeddings", config.seq_length)
    model = MDLMModel(
        config,
        MaskedDiffusion(mask_token_id=mask_token.id, right_shift=facts.right_shift),
        tokenizer=nemo_tokenizer(path, mask_token),
    )
    build_on_cpu(model, dtype=weights_dtype(checkpoint))
    load_hf_weights(model.module, path)
    return model
