"""Checkpoint folders for serving engines: a Hugging Face export with what the engine reads, checked against tables."""

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from nemo_dllm.connectors.checkpoint_files import CONFIG_FILE, HFCheckpoint, write_hf_checkpoint
from nemo_dllm.connectors.companions import small_files
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.engine_layouts import LMDEPLOY, SGLANG, Layout
from nemo_dllm.connectors.facts import CheckpointFacts, read_facts
from nemo_dllm.connectors.families.registry import FAMILIES, family_of, find_family
from nemo_dllm.connectors.family import Family
from nemo_dllm.connectors.hf_export import export_hf_checkpoint
from nemo_dllm.connectors.model_context import load_model_context
from nemo_dllm.connectors.new_folder import place_folder, refuse_existing, unfinished_sibling
from nemo_dllm.connectors.safetensors_writer import TensorHeader
from nemo_dllm.connectors.shard_layout import json_bytes, read_shard_layout
from nemo_dllm.connectors.stacked_experts import StackedExperts

ALGORITHM_FILE = "dllm_algorithm.yaml"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
# Engines ask transformers for a configuration; of a class that it lacks, it needs no more than the name.
_CONFIGURATION_CODE = '''"""The configuration of {model_type} models: the fields of config.json as they are."""

from transformers import PretrainedConfig


class {name}(PretrainedConfig):
    model_type = "{model_type}"
'''


@dataclass(frozen=True)
class Engine:
    """A serving engine.

    Args:
        name: what users call it.
        layouts: what it loads, by the first name in ``architectures``.
        command: that serves a folder; ``{path}`` and ``{block_size}`` are filled in.
        algorithm_file: content of ``ALGORITHM_FILE``, which ``command`` names; None where there is none.
        serves_none: why it serves no family here.
    """

    name: str
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    command: str = ""
    algorithm_file: str | None = None
    serves_none: str = ""

    @property
    def families(self) -> list[str]:
        """Names of the families that it serves."""
        return [f.name for f in FAMILIES if any(c.architecture in self.layouts for c in f.hf_classes)]


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            "sglang",
            SGLANG,
            "python -m sglang.launch_server --model-path {path} --trust-remote-code --dllm-algorithm LowConfidence "
            "--dllm-algorithm-config {path}/" + ALGORITHM_FILE,
            algorithm_file="block_size: {block_size}\n",
        ),
        Engine(
            "lmdeploy",
            LMDEPLOY,
            "lmdeploy serve api_server {path} --backend pytorch --trust-remote-code --dllm-block-length {block_size}",
        ),
        Engine(
            "vllm",
            serves_none="its only diffusion language model is DiffusionGemmaForBlockDiffusion, which is none of them",
        ),
    )
}


class EngineExport(NamedTuple):
    """A folder for an engine.

    Attributes:
        path: the folder.
        command: that serves it.
        notes: what the engine does otherwise than the model was trained for, a sentence each.
    """

    path: Path
    command: str
    notes: tuple[str, ...]


def export_for_engine(
    path: str | Path, output_path: str | Path, engine: str, *, overwrite: bool = False
) -> EngineExport:
    """Write a checkpoint as the folder that a serving engine loads; whole or not at all.

    Beside what :func:`export_hf_checkpoint` writes it has every field of config.json that the engine reads, code for
    ``AutoConfig`` where the checkpoint brings none, and the engine's own settings. Experts are one tensor each. Fields,
    tensors and shapes are held against the engine's table; the engine itself is not run.

    Args:
        path: NeMo checkpoint of a diffusion model, or Hugging Face folder of one.
        output_path: folder to make.
        engine: a name in ``ENGINES``.
        overwrite: replace an existing folder.

    Raises:
        FileExistsError: where ``output_path`` exists and ``overwrite`` is False.
        FileNotFoundError, ValueError: where ``path`` is no checkpoint of a diffusion model.
        ValueError: where there is no such engine, it does not serve the family, or would load another model, and where
            ``output_path`` contains ``path``.
    """
    target = find_engine(engine)
    path, output_path = Path(path), Path(output_path)
    refuse_existing(output_path, overwrite, reads=(path,))
    is_hf = (path / CONFIG_FILE).is_file() and not (path / "context").is_dir()
    family, trained_in_blocks = _hf_family(path) if is_hf else _nemo_family(path)
    _refuse_unserved(target, family)
    working = unfinished_sibling(output_path)
    folder = working / output_path.name
    try:
        (_copy_hf_checkpoint if is_hf else export_hf_checkpoint)(path, folder)
        block_size, notes = _finish(folder, target, read_facts(path if is_hf else folder))
        place_folder(folder, output_path, overwrite)
    finally:
        shutil.rmtree(working, ignore_errors=True)
    if not trained_in_blocks:
        notes += (f"the model was trained without blocks, and {target.name} samples it in blocks of {block_size}",)
    command = target.command.format(path=shlex.quote(str(output_path)), block_size=block_size)
    return EngineExport(output_path, command, notes)


def find_engine(name: str) -> Engine:
    """The engine of a name.

    Raises:
        ValueError: there is none; says which there are.
    """
    if name not in ENGINES:
        raise ValueError(f"engine={name!r} is unknown; known: {', '.join(ENGINES)}; they serve: {_served()}")
    return ENGINES[name]


def _refuse_unserved(engine: Engine, family: Family) -> None:
    if family.name in engine.families:
        return
    why = f" ({engine.serves_none})" if engine.serves_none else ""
    raise ValueError(
        f"{engine.name} does not serve the family {family.name}{why}; engines serve: {_served()}; export it without an "
        "engine for transformers, or serve it with nemo-dllm serve"
    )


def _served() -> str:
    return "; ".join(f"{engine.name} {', '.join(engine.families) or 'none'}" for engine in ENGINES.values())


def _hf_family(path: Path) -> tuple[Family, bool]:
    """The family, and whether the model is one of blocks: all that are served are, as far as a folder tells."""
    return find_family(HFCheckpoint(path).config), True


def _nemo_family(path: Path) -> tuple[Family, bool]:
    model = load_model_context(path)
    return family_of(model.config), model.objective.block_size is not None


def _copy_hf_checkpoint(source: Path, folder: Path) -> None:
    """In safetensors, with one tensor per expert."""
    checkpoint = StackedExperts(HFCheckpoint(source))
    first = slice(0, 1)
    headers = {
        name: TensorHeader(checkpoint.tensor(name, first).dtype, shape) for name, shape in checkpoint.shapes.items()
    }
    write_hf_checkpoint(
        folder,
        checkpoint.config,
        headers,
        ((name, checkpoint.tensor(name).contiguous()) for name in headers),
        layout=read_shard_layout(source),
        extra_files={name: file.read_bytes() for name, file in small_files(source).items() if name != CONFIG_FILE},
    )


def _finish(folder: Path, engine: Engine, facts: CheckpointFacts) -> tuple[int, tuple[str, ...]]:
    """Complete and check a folder; returns the model's block size, and notes."""
    checkpoint = HFCheckpoint(folder)
    family = find_family(checkpoint.config)
    served = family.hf_class(checkpoint.config)
    if facts.attention == "causal" or served.architecture not in engine.layouts:
        raise ValueError(
            f"{engine.name} serves {', '.join(engine.layouts)} of the family {family.name}, and this is a "
            f"{served.architecture} that attends in the manner {facts.attention}"
        )
    layout = engine.layouts[served.architecture]
    nemo_config = hf_to_nemo_config(folder)
    described = family.config.to_hf(nemo_config)
    # Engines pass over these too: rotary tables, and a tied head that is stored.
    table = family.key_table(nemo_config)
    shapes = {name: shape for name, shape in checkpoint.shapes.items() if table.reason_to_ignore(name) is None}
    silent = {f"{name}_token_id": facts.special_token_ids.get(f"{name}_token_id") for name in ("bos", "eos", "pad")}
    # Null says nothing, and to an engine that it is False.
    absent = {name for name in layout.fields if checkpoint.config.get(name) is None}
    config = checkpoint.config | {name: value for name, value in (silent | described).items() if name in absent}
    config |= {"architectures": [served.architecture], "model_type": served.exported_as or served.model_type}
    config |= {"mask_token_id": facts.mask_token_id, "block_size": facts.block_size}
    _check(engine, layout, config, shapes)
    notes = _notes(engine, layout, facts, folder)
    config |= _configuration_code(folder, config)
    if engine.algorithm_file is not None:
        (folder / ALGORITHM_FILE).write_text(engine.algorithm_file.format(block_size=facts.block_size))
    (folder / CONFIG_FILE).write_bytes(json_bytes(config))
    return facts.block_size, notes


def _configuration_code(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """``auto_map`` for config.json, with the code that it names in the folder."""
    auto_map = config.get("auto_map") or {}
    kept = {name: target for name, target in auto_map.items() if _is_there(folder, target)}
    if "AutoConfig" not in kept:
        module, name = f"configuration_{config['model_type']}", "ServedConfig"
        code = _CONFIGURATION_CODE.format(model_type=config["model_type"], name=name)
        (folder / f"{module}.py").write_text(code)
        kept["AutoConfig"] = f"{module}.{name}"
    return {"auto_map": kept}


def _is_there(folder: Path, target: str) -> bool:
    """Whether the code of an entry is in the folder; one with ``--`` names another repository."""
    return "--" in target or (folder / f"{target.split('.')[0]}.py").is_file()


def _check(engine: Engine, layout: Layout, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError where the engine would fail to load a checkpoint, or load another model."""
    problems = [f"config.json lacks {name}" for name in sorted(layout.fields - config.keys())]
    problems += [
        f"{name}={config[name]!r} (it takes {', '.join(map(repr, known))})"
        for name, known in layout.values.items()
        if name in config and config[name] not in known
    ]
    if not problems:
        wanted = layout.shapes(config)
        problems += [f"{name} is missing" for name in sorted(wanted.keys() - shapes.keys())]
        problems += [f"{name} is unknown to it" for name in sorted(shapes.keys() - wanted.keys())]
        problems += [
            f"{name} has the shape {list(shapes[name])}, not {list(shape)}"
            for name, shape in sorted(wanted.items())
            if name in shapes and shapes[name] != shape
        ]
    if problems:
        shown = "; ".join(problems[:8]) + (f"; and {len(problems) - 8} more" if len(problems) > 8 else "")
        raise ValueError(f"{engine.name} cannot load this {config['architectures'][0]}: {shown}")


def _notes(engine: Engine, layout: Layout, facts: CheckpointFacts, folder: Path) -> tuple[str, ...]:
    """What the engine does otherwise than the model was trained for.

    Raises:
        ValueError: where nothing that it samples can be right.
    """
    if facts.right_shift:
        raise ValueError(
            f"{engine.name} reads logits at their own position, and this model's score the next one "
            "(right_shift_logits); sample it with nemo-dllm"
        )
    if facts.ar_loss_weight > 0:
        raise ValueError(
            f"{engine.name} encodes finished blocks in both directions, and this model encodes them causally "
            f"(ar_loss_weight={facts.ar_loss_weight}); sample it with nemo-dllm"
        )
    notes = []
    if facts.mask_token_id != layout.mask_token_id:
        notes.append(
            f"{engine.name} always takes {layout.mask_token_id} for the mask token of this architecture, and this "
            f"model's is {facts.mask_token_id}: change that number in the engine's source before you serve it"
        )
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        notes.append("the checkpoint has no tokenizer; add its files to the folder")
    return tuple(notes)
