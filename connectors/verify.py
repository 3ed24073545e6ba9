"""Whether a converted checkpoint is the model that it was made of: every weight, and logits on real prompts.

Shape letters: B rows, T positions, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from nemo_dllm.collections.diffusion.attention.masks import Bidirectional, BlockCausal, Pattern
from nemo_dllm.collections.diffusion.models.core import DiffusionCore
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
from nemo_dllm.collections.diffusion.single_process import single_process
from nemo_dllm.connectors.build import build_on_cpu
from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.facts import CheckpointFacts, read_facts, weights_dtype
from nemo_dllm.connectors.families.registry import family_of, find_family
from nemo_dllm.connectors.hf_export import load_nemo_checkpoint
from nemo_dllm.connectors.load import export_hf_tensors, load_hf_weights
from nemo_dllm.connectors.tokenizer_files import load_hf_tokenizer
from nemo_dllm.connectors.vocabulary_growth import vocabulary_tables

PROMPTS = (
    "The capital of France is Paris, and the capital of Italy is",
    "def mean(values):\n    return sum(values) / len(values)",
    "Question: A train covers 120 km in 1.5 hours. What is its speed? Answer:",
)
_DRAWN_TOKENS = 32


class Difference(NamedTuple):
    """How far two tensors are from each other."""

    name: str
    max_error: float
    """Largest absolute difference; infinite where the shapes differ."""
    cosine: float


@dataclass(frozen=True)
class Verification:
    """What :func:`verify_checkpoint` found.

    Args:
        family: name of the family.
        attention: ``causal``, ``bidirectional`` or ``block_causal``: how both sides attended.
        reference: whose logits those of the checkpoint are compared with.
        weights: one for each tensor.
        unmatched: tensors that one side only has.
        logits: one for each prompt.
        tolerance: largest absolute difference allowed.
        dtype: that both sides' weights were rounded to before the comparison: the coarser of the two.
        facts: what the two sides say differently of mask token, logit shift and block size, where both say it.
    """

    family: str
    attention: str
    reference: str
    weights: list[Difference]
    unmatched: list[str]
    logits: list[Difference]
    tolerance: float
    dtype: torch.dtype
    facts: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing is unmatched or said differently, and no difference above the tolerance, or not a number."""
        differences = [*self.weights, *self.logits]
        return (
            not self.unmatched
            and not self.facts
            and all(difference.max_error <= self.tolerance for difference in differences)
        )


def verify_checkpoint(
    hf_path: str | Path, checkpoint: str | Path, *, tolerance: float = 1e-3, prompts: Sequence[str] = PROMPTS
) -> Verification:
    """Compare a checkpoint with the Hugging Face checkpoint that it was made of, or into.

    Where one side has weights of a coarser dtype, as an export in bf16 of a training in fp32, those of the other are
    rounded to it: that is no difference. Logits are compared in fp32, on the CPU, under the attention of the Hugging
    Face checkpoint's own class. The reference is that class where transformers has it. Other classes are code of their
    checkpoints, which is never run: there both sides are this package's forward pass, which proves the weights, not the
    architecture.

    Args:
        hf_path: folder of the Hugging Face checkpoint.
        checkpoint: folder of a NeMo checkpoint, or of another Hugging Face checkpoint.
        tolerance: largest absolute difference allowed, of weights and of logits.
        prompts: texts; one row of tokens from the whole vocabulary is added to them.

    Raises:
        FileNotFoundError, ValueError: for folders that are no such checkpoints.
        ValueError: where the two are of different families, and for a tolerance below 0.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance:g} must be at least 0")
    source, facts = HFCheckpoint(hf_path), read_facts(hf_path)
    rows = _token_rows(source, prompts)
    with single_process():
        core, stored, told = _opened(Path(checkpoint))
        other = family_of(core.config)
        if other.name != facts.family:
            raise ValueError(
                f"{source.path} is of family {facts.family}, {checkpoint} of family {other.name}: two models, and no "
                "conversion of one; compare checkpoints of one family"
            )
        weights, unmatched = _compare_weights(source, stored(), core.config)
        dtype = coarser(weights_dtype(source), next(core.parameters()).dtype)
        own_class = _has_own_class(source, facts)
        if own_class:
            reference = _own_class_logits(source, rows, dtype)
        else:
            reference = _our_logits(_hf_core(source.path), facts, rows, dtype)
        ours = _our_logits(core, facts, rows, dtype)
    # The checkpoint may have more tokens.
    logits = [
        difference(f"prompt {index}", left, right[..., : left.size(-1)])
        for index, (left, right) in enumerate(zip(reference, ours, strict=True), start=1)
    ]
    published = find_family(source.config).hf_class(source.config).architecture
    name = f"transformers {published}" if own_class else "this package's forward of the folder"
    said = _said_differently(facts, told)
    return Verification(facts.family, facts.attention, name, weights, unmatched, logits, tolerance, dtype, said)


def _said_differently(facts: CheckpointFacts, told: Any) -> list[str]:
    """An autoregressive checkpoint says nothing of a shift, and one that gets a mask token added nothing of that."""
    here = {"block_size": facts.block_size, "mask_token_id": facts.declared_mask_token_id}
    if facts.attention != "causal":
        here["right_shift"] = facts.right_shift
    return [
        f"{name}={value} in the Hugging Face checkpoint, {getattr(told, name)} in the other"
        for name, value in sorted(here.items())
        if None not in (value, getattr(told, name)) and getattr(told, name) != value
    ]


def coarser(left: torch.dtype, right: torch.dtype) -> torch.dtype:
    """The one of two floating dtypes that rounds more."""
    return max(left, right, key=lambda dtype: torch.finfo(dtype).eps)


def difference(name: str, left: Tensor, right: Tensor) -> Difference:
    """Compare two tensors of floats: rounded to the coarser dtype of the two, in fp64."""
    if left.shape != right.shape:
        return Difference(name, float("inf"), float("nan"))
    dtype = coarser(left.dtype, right.dtype)
    left, right = left.to(dtype), right.to(dtype)
    left, right = left.double().flatten(), right.double().flatten()
    # Zeros have no direction: those of two sides are as alike as can be.
    cosine = 1.0 if torch.equal(left, right) else torch.nn.functional.cosine_similarity(left, right, dim=0).item()
    return Difference(name, (left - right).abs().max().item(), cosine)


def _compare_weights(
    source: HFCheckpoint, tensors: Iterator[tuple[str, Tensor]], config
) -> tuple[list[Difference], list[str]]:
    table = find_family(source.config).key_table(config)
    tables = vocabulary_tables(table)
    expected = {name for name in source.keys() if table.reason_to_ignore(name) is None}  # noqa: SIM118
    differences, unmatched = [], []
    for name, tensor in tensors:
        if name not in expected:
            if table.reason_to_ignore(name) is None:
                unmatched.append(f"{name} (only in the checkpoint)")
            continue
        expected.remove(name)
        rows = source.shapes[name][0] if name in tables else None
        differences.append(difference(name, source.tensor(name), tensor[:rows]))
    return differences, unmatched + [f"{name} (not in the checkpoint)" for name in sorted(expected)]


def _opened(path: Path) -> tuple[DiffusionCore, Callable[[], Iterator[tuple[str, Tensor]]], Any]:
    """The model of a checkpoint, what yields its stored tensors under their Hugging Face names, and its facts."""
    if (path / "context").is_dir():
        model = load_nemo_checkpoint(path, as_stored=True)
        core = unwrap_model(model.module)
        return core, lambda: export_hf_tensors(core), model.objective
    checkpoint = HFCheckpoint(path)
    tensors = partial(map, lambda name: (name, checkpoint.tensor(name)), checkpoint.keys())
    return _hf_core(path), tensors, read_facts(path)


def _hf_core(path: Path) -> DiffusionCore:
    # Any token will do as the mask: nothing is corrupted.
    model = MDLMModel(hf_to_nemo_config(path), MaskedDiffusion(mask_token_id=0))
    build_on_cpu(model, dtype=weights_dtype(HFCheckpoint(path)))
    load_hf_weights(model.module, path)
    return model.module


@torch.no_grad()
def _our_logits(
    core: DiffusionCore, facts: CheckpointFacts, rows: Sequence[Tensor], dtype: torch.dtype
) -> list[Tensor]:
    _round(core, dtype)
    core.float().eval()
    core.config.params_dtype = torch.float32
    pattern = _pattern(facts)
    return [core(tokens_BT, attention_mask=pattern) for tokens_BT in rows]


def _pattern(facts: CheckpointFacts) -> Pattern:
    if facts.attention == "bidirectional":
        return Bidirectional()
    # A family of block-causal models has a block size for configurations that name none.
    return BlockCausal(1 if facts.attention == "causal" else facts.block_size)


def _round(model: nn.Module, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(coarser(dtype, parameter.dtype))


def _has_own_class(source: HFCheckpoint, facts: CheckpointFacts) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return facts.attention == "causal" and source.config["model_type"] in CONFIG_MAPPING_NAMES


@torch.no_grad()
def _own_class_logits(source: HFCheckpoint, rows: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    family = find_family(source.config)
    # Each version of transformers has spellings of its own, and takes silence in them for its defaults.
    spellings = family.config.rule_fields(family.build_nemo_config(source.config))
    unsaid = {name: value for name, value in spellings.items() if source.config.get(name) in (None, {})}
    model = AutoModelForCausalLM.from_pretrained(
        str(source.path),
        config=CONFIG_MAPPING[source.config["model_type"]].from_dict(source.config | unsaid),
        torch_dtype=torch.float32,
        trust_remote_code=False,
    )
    _round(model, dtype)
    return [model.eval().float()(tokens_BT).logits for tokens_BT in rows]


def _token_rows(source: HFCheckpoint, prompts: Sequence[str]) -> list[Tensor]:
    tokenizer = load_hf_tokenizer(source.path)
    texts = [] if tokenizer is None else [tokenizer(prompt)["input_ids"] for prompt in prompts]
    drawn = torch.randint(
        find_family(source.config).vocab_size(source.config),
        (_DRAWN_TOKENS,),
        generator=torch.Generator().manual_seed(0),
    )
    return [torch.tensor([ids]) for ids in [*texts, drawn.tolist()] if ids]
