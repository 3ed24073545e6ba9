"""A conversion holds the model once, and beside it no more than one layer."""

import ctypes
import gc
import json
from pathlib import Path

import pytest
import torch

from nemo_dllm.connectors.checkpoint_files import write_hf_checkpoint
from nemo_dllm.connectors.safetensors_writer import TensorHeader

pytestmark = pytest.mark.nemo

LAYERS, HIDDEN, FFN, VOCAB, HEAD_DIM = 24, 512, 2048, 2048, 64
SHARD = 30_000_000
# Bytes: of the allocator, of the objects that NeMo makes, and of what Megatron writes at a time.
SLACK = {"import": 80_000_000, "export": 30_000_000}


@pytest.fixture(scope="module")
def source(models, tmp_path_factory):
    """About 200 MB in bf16, half of it gate and up projections, which Megatron writes in parts."""
    config = json.loads((models / "qwen3" / "config.json").read_text()) | {
        "num_hidden_layers": LAYERS,
        "max_window_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": HEAD_DIM,
        "mask_token_id": 5,
        "torch_dtype": "bfloat16",
    }
    folder = tmp_path_factory.mktemp("source") / "model"
    made = dict(tensors())
    headers = {name: TensorHeader.of(tensor) for name, tensor in made.items()}
    return write_hf_checkpoint(folder, config, headers, made.items(), max_shard_size=SHARD)


def tensors():
    def make(name, *shape):
        return f"{name}.weight", torch.randn(*shape, dtype=torch.bfloat16)

    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield from (make(f"{prefix}.{norm}_layernorm", HIDDEN) for norm in ("input", "post_attention"))
        yield from (make(f"{prefix}.self_attn.{part}_norm", HEAD_DIM) for part in "qk")
        yield make(f"{prefix}.self_attn.q_proj", 8 * HEAD_DIM, HIDDEN)
        yield from (make(f"{prefix}.self_attn.{part}_proj", 4 * HEAD_DIM, HIDDEN) for part in "kv")
        yield make(f"{prefix}.self_attn.o_proj", HIDDEN, 8 * HEAD_DIM)
        yield from (make(f"{prefix}.mlp.{part}_proj", FFN, HIDDEN) for part in ("gate", "up"))
        yield make(f"{prefix}.mlp.down_proj", HIDDEN, FFN)
    yield make("model.norm", HIDDEN)
    yield from (make(name, VOCAB, HIDDEN) for name in ("model.embed_tokens", "lm_head"))


def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.fixture
def peak_of(single_process):
    """Bytes of memory that a call takes at most, above those in use before."""

    def run(function, *arguments, **options):
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        function(*arguments, **options)
        return memory("VmHWM") - before

    return run


def test_import_and_export(peak_of, source, tmp_path):
    from nemo_dllm.connectors.conversion import import_checkpoint
    from nemo_dllm.connectors.hf_export import export_hf_checkpoint

    peaks = {
        "import": peak_of(import_checkpoint, source, tmp_path / "nemo"),
        "export": peak_of(export_hf_checkpoint, tmp_path / "nemo", tmp_path / "hf"),
    }
    summary = json.loads((tmp_path / "hf" / "nemo_dllm_conversion.json").read_text())
    model = 2 * summary["parameters"]["total"]
    layer = (model - 2 * summary["parameters"]["embedding"]) // LAYERS
    print({name: f"{peak / model:.2f} x the model" for name, peak in peaks.items()})
    index = "model.safetensors.index.json"
    assert (tmp_path / "hf" / index).read_bytes() == (source / index).read_bytes()
    for direction, peak in peaks.items():
        assert peak < model + layer + SLACK[direction] < 1.5 * model, direction
