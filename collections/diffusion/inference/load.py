"""A checkpoint as a model to sample from."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.lightning import io

from nemo_dllm.collections.diffusion.characters import check_characters
from nemo_dllm.collections.diffusion.checkpoint_folder import CheckpointKind
from nemo_dllm.collections.diffusion.inference.cached import MegatronDenoiser
from nemo_dllm.collections.diffusion.inference.locate import locate_checkpoint
from nemo_dllm.collections.diffusion.inference.text_decoder import TextDecoder
from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
from nemo_dllm.collections.diffusion.models.core import DiffusionCore
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion, Objective
from nemo_dllm.collections.diffusion.sampling import SamplerConfig, preset_fields
from nemo_dllm.collections.diffusion.single_process import start_single_process
from nemo_dllm.connectors.build import build_on_cpu
from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.companions import sample_length
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.facts import read_facts, weights_dtype
from nemo_dllm.connectors.families.registry import family_of, find_family
from nemo_dllm.connectors.hf_export import load_nemo_checkpoint
from nemo_dllm.connectors.load import load_hf_weights
from nemo_dllm.connectors.mask_token import mask_token_at
from nemo_dllm.connectors.model_context import damage_named
from nemo_dllm.connectors.nemo_tokenizer import nemo_tokenizer
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer

# What released models of a family are sampled with.
FAMILY_PRESETS = {
    "dream": "dream",
    "llada": "llada",
    "llada2": "llada2",
    "llada_moe": "llada",
    "sdar": "sdar",
    "sdar_moe": "sdar",
}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model to sample from, with what its checkpoint says about it.

    Attributes:
        core: the Megatron model, whole, in evaluation mode.
        tokenizer: NeMo's tokenizer of the checkpoint; None where it has none.
        objective: what it was trained for, or would be: mask token, logit shift, and blocks where it attends by blocks.
        family: of the connectors; None for a model of no family.
        sample_length: tokens of the samples of its last training, where it was exported from that; None where the
            checkpoint tells no more than ``seq_length``.
    """

    core: DiffusionCore
    tokenizer: TokenizerSpec | None
    objective: Objective
    family: str | None = None
    sample_length: int | None = None

    @cached_property
    def denoiser(self) -> MegatronDenoiser:
        """What samplers call, with a cache or without."""
        return MegatronDenoiser(self.core, self.block_size, self.block_size is not None and self.objective.causal_clean)

    @property
    def mask_token_id(self) -> int:
        """Token shown at positions to fill."""
        return self.objective.mask_token_id

    @property
    def right_shift(self) -> bool:
        """Whether the logits at position i score position i + 1."""
        return self.objective.right_shift

    @property
    def block_size(self) -> int | None:
        """Tokens per block of a model that is block-causal; None for a bidirectional one."""
        return self.objective.block_size

    @property
    def default_preset(self) -> str | None:
        """The preset of the model's family, where it attends as that family's released models do."""
        name = FAMILY_PRESETS.get(self.family)
        is_block_causal = name is not None and preset_fields(name).get("cache") == "exact"
        return name if is_block_causal == (self.block_size is not None) else None

    @property
    def config(self) -> TransformerConfig:
        """NeMo's configuration of the model."""
        return self.core.config

    @property
    def seq_length(self) -> int:
        """The model's context, tokens: of a run, and of what it saves, those of the samples of its training."""
        return self.config.seq_length

    @property
    def device(self) -> torch.device:
        """Where the weights are, and inputs have to be."""
        return next(self.core.parameters()).device

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without added special tokens.

        Raises:
            ValueError: where the checkpoint has no tokenizer, or JSON or a command line has brought what is no text.
        """
        check_characters(text)
        return self._text_tokenizer().text_to_ids(text)

    def decode(self, token_ids: list[int]) -> str:
        """Text of token ids, without special tokens.

        Raises:
            ValueError: where the checkpoint has no tokenizer.
        """
        return self._decoder(token_ids)

    @cached_property
    def _decoder(self) -> TextDecoder:
        return TextDecoder(self._text_tokenizer())

    def sampler_config(self, preset: str | None = None, **settings: Any) -> SamplerConfig:
        """Sampler settings with what the checkpoint decides: shift, blocks, start and end token, ids that are no text.

        A start token is set where an empty prompt needs one, which is with the shift.

        Args:
            preset: a name in ``sampling.PRESETS``, whose fields the checkpoint's win over; None is ``default_preset``.
            settings: further fields of ``SamplerConfig``, which win over both.

        Raises:
            ValueError: for fields that do not fit together, or do not fit the model: one that is block-causal is
                sampled by the blocks of its training.
        """
        num_tokens = self.core.logical_vocab_size
        num_texts = num_tokens if self.tokenizer is None else self.tokenizer.vocab_size
        of_checkpoint = {
            "right_shift": self.right_shift,
            "bos_token_id": getattr(self.tokenizer, "bos_id", None) if self.right_shift else None,
            "eos_token_id": getattr(self.tokenizer, "eos_id", None),
            "suppress_token_ids": tuple(range(num_texts, num_tokens)),
        }
        if self.block_size is not None:
            of_checkpoint |= {"block_size": self.block_size, "block_origin": "sequence", "cache": "exact"}
        preset = preset or self.default_preset
        of_preset = {} if preset is None else preset_fields(preset)
        fields = of_preset | of_checkpoint | settings
        # Before all else: the blocks that an exact cache asks for would not mend it.
        if self.block_size is None and fields.get("cache") == "exact":
            raise ValueError(
                "cache='exact' is for block-causal models, and this one attends in both directions; choose "
                "approximate_prefix, approximate_dual or approximate_delayed, or leave it None"
            )
        config = SamplerConfig(**fields)
        if self.block_size is not None and config.cache not in (None, "exact"):
            raise ValueError(
                f"cache={config.cache!r} is for bidirectional models, and this one is block-causal; take 'exact'"
            )
        if self.block_size is not None and config.block_size != self.block_size:
            raise ValueError(
                f"block_size={config.block_size} is not the {self.block_size} that this block-causal model has learnt; "
                "leave it out"
            )
        return config

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
    core = model.module.eval().requires_grad_(False)
    if torch.cuda.is_available():
        core.cuda()
    else:
        core.float()
        core.config.params_dtype = torch.float32
    family = _family_name(model.config)
    return LoadedModel(core, model.tokenizer, model.objective, family, sample_length(checkpoint.path))


def context_length(path: str | Path, *, best: bool = False) -> int:
    """What ``LoadedModel.seq_length`` will be, tokens, without loading the weights.

    Args:
        path, best: see :func:`load_checkpoint`.

    Raises:
        FileNotFoundError, ValueError: see :func:`locate_checkpoint`; and where its configuration is damaged.
    """
    checkpoint = locate_checkpoint(path, best=best)
    if checkpoint.kind is CheckpointKind.HUGGING_FACE:
        return hf_to_nemo_config(checkpoint.path).seq_length
    with damage_named(checkpoint.path / "context"):
        return io.load_context(checkpoint.path, subpath="model.config").seq_length


def _family_name(config: TransformerConfig) -> str | None:
    try:
        return family_of(config).name
    except ValueError:  # Trained from scratch with sizes of no family.
        return None


def _load_hf_checkpoint(path: Path) -> DiffusionModel:
    facts = read_facts(path)
    if facts.attention == "causal":
        raise ValueError(
            f"{path} is an autoregressive model, which cannot fill in tokens; make it a diffusion model first: "
            f"nemo-dllm finetune --factory \"NAME(init_from='{path}')\" (nemo-dllm recipes lists the names)"
        )
    checkpoint = HFCheckpoint(path)
    family = find_family(checkpoint.config)
    # An added one may have a row among those that published tables have to spare.
    if facts.mask_token_id is None or facts.mask_token_id >= family.vocab_size(checkpoint.config):
        raise ValueError(f"{path} has no mask token; set mask_token_id in its config.json to the id of the mask token")
    mask_token = mask_token_at(facts.mask_token_id, load_hf_tokenizer(path), checkpoint.config, family)
    config = hf_to_nemo_config(path)
    fixed = {"mask_token_id": mask_token.id, "right_shift": facts.right_shift}
    # A class that attends in both directions has blocks where it was exported from block diffusion.
    if facts.block_size is None:
        model_class, objective = MDLMModel, MaskedDiffusion(**fixed)
    else:
        model_class, objective = BD3LMModel, BlockDiffusion(**fixed, **facts.block_fields)
    model = model_class(config, objective, tokenizer=nemo_tokenizer(path, mask_token))
    build_on_cpu(model, dtype=weights_dtype(checkpoint))
    load_hf_weights(model.module, path)
    return model
