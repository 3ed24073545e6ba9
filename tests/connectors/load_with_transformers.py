"""Load diffusion checkpoints with plain transformers and print as JSON what comes of it: folder...

The process has no nemo_dllm, so it runs under any interpreter with torch and transformers.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp()
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file

AUTO_CLASSES = ("AutoModel", "AutoModelForMaskedLM")


@torch.no_grad()
def differences(model, golden) -> dict[str, float]:
    """Largest difference of the logits to the recorded ones, at real tokens."""
    ids = golden["input_ids"]
    inputs = {
        "logits": {"input_ids": ids},
        "padded_logits": {"input_ids": golden["padded_input_ids"], "attention_mask": golden["padded_attention_mask"]},
        "pos_logits": {"input_ids": ids, "position_ids": golden["pos_position_ids"]},
        "block_logits": {"input_ids": ids, "attention_mask": golden["block_attention_mask"]},
    }
    real = {"padded_logits": golden["padded_attention_mask"].bool()}
    # Checkpoints that began causal have recorded both kinds.
    recorded = {name: golden.get(f"{name}_bidirectional", golden[name]) for name in inputs}
    everywhere = torch.ones_like(ids).bool()
    return {
        name: (model(**kwargs).logits - recorded[name])[real.get(name, everywhere)].abs().max().item()
        for name, kwargs in inputs.items()
    }


@torch.no_grad()
def finite_without_keys(model, ids) -> bool:
    """Whether logits stay finite for a padding mask and a 4-D mask with rows that allow nothing."""
    nothing = torch.zeros_like(ids)
    rows = torch.eye(ids.shape[1], dtype=torch.bool)[None, None].repeat(len(ids), 1, 1, 1)
    rows[:, :, 0] = False
    return all(model(ids, attention_mask=mask).logits.isfinite().all().item() for mask in (nothing, rows))


# What tokenizers, pipelines and adapters pass along.
CALLS = {
    "token_type_ids": torch.zeros_like,
    "use_cache": lambda ids: True,
    "labels": lambda ids: None,
    "past_key_values": lambda ids: None,
    "output_attentions": lambda ids: False,
    "return_dict": lambda ids: False,
}


@torch.no_grad()
def changed_by_arguments(model, golden) -> dict[str, float]:
    """Largest difference that each argument without effect makes to the logits, and each dtype of the mask."""
    ids, mask = golden["padded_input_ids"], golden["padded_attention_mask"]
    plain = model(ids, attention_mask=mask)[0]
    calls = {name: {"attention_mask": mask, name: value(ids)} for name, value in CALLS.items()}
    dtypes = (torch.bool, torch.int8, torch.float16, torch.float32)
    calls |= {str(dtype): {"attention_mask": mask.to(dtype)} for dtype in dtypes}
    return {name: (model(ids, **call)[0] - plain).abs().max().item() for name, call in calls.items()}


def changed_by_checkpointing(model, golden) -> float:
    """Largest difference that recomputed layers make to a gradient."""
    model.train()
    gradients = []
    for prepare in (lambda: None, model.gradient_checkpointing_enable):
        prepare()
        model.zero_grad()
        logits = model(golden["padded_input_ids"], attention_mask=golden["padded_attention_mask"]).logits
        logits.square().sum().backward()
        gradients.append(model.get_input_embeddings().weight.grad.clone())
    model.eval()
    return (gradients[1] - gradients[0]).abs().max().item()


def facts(folder: Path) -> dict:
    golden = load_file(folder / "golden.safetensors")
    loaded = {}
    for auto_class in AUTO_CLASSES:
        for attention in ("sdpa", "eager"):
            model = getattr(transformers, auto_class).from_pretrained(
                folder, trust_remote_code=True, attn_implementation=attention
            )
            loaded[f"{auto_class} {attention}"] = differences(model.eval(), golden)
    hidden = model(golden["input_ids"], output_hidden_states=True).hidden_states
    model.config.output_hidden_states = True
    assert len(model(golden["input_ids"]).hidden_states) == len(hidden)
    model.config.output_hidden_states = False
    saved = folder / "saved"
    model.save_pretrained(saved)
    again = transformers.AutoModelForMaskedLM.from_pretrained(saved, trust_remote_code=True).eval()
    return {
        "class": type(model).__name__,
        "loaded": loaded,
        "again": differences(again, golden),
        "finite": finite_without_keys(model, golden["input_ids"]),
        "arguments": changed_by_arguments(model, golden),
        "checkpointing": changed_by_checkpointing(again, golden),
        "hidden_states": [list(state.shape) for state in hidden],
        "causal": [layer.self_attn.is_causal for layer in model.model.layers],
        "generates": hasattr(model, "generate"),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "keys": sorted(load_file(saved / "model.safetensors")),
        "files": sorted(file.name for file in saved.iterdir()),
        "config": json.loads((saved / "config.json").read_text()),
    }


if __name__ == "__main__":
    report = {name: facts(Path(name)) for name in sys.argv[1:]}
    print(json.dumps({"version": transformers.__version__, "folders": report}))
