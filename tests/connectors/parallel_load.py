"""One of two ranks that load checkpoints in several layouts, run as a script: store rank models.

Fails where logits are not the golden ones or the export is not the checkpoint. Prints ``ok`` last.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from safetensors.torch import load_file

from nemo_dllm.collections.diffusion import cpu
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.load import export_hf_tensors, load_hf_weights
from nemo_dllm.connectors.vocabulary_growth import GrownCheckpoint

# checkpoint, tensor parallel size, pipeline parallel size
LAYOUTS = (
    *(("qwen3", 2, 1), ("qwen3_tied", 2, 1), ("qwen3_sharded", 1, 2), ("qwen3_tied", 1, 2)),
    *(("qwen2", 2, 1), ("dream", 1, 2), ("llama3_rope", 2, 1), ("llama3_rope", 1, 2), ("llada_gqa", 2, 1)),
)
# Tokens, more than the files have.
GROWN = 203


def build(folder, tensor, pipeline, **fields):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = hf_to_nemo_config(folder)
    config.tensor_model_parallel_size, config.pipeline_model_parallel_size = tensor, pipeline
    config.pipeline_dtype = torch.float32
    for name, value in fields.items():
        setattr(config, name, value)
    model = MDLMModel(config, MaskedDiffusion(mask_token_id=196))
    model.configure_model()
    for parameter in model.module.parameters():
        parameter.data.fill_(float("nan"))
    return model.module.eval()


@torch.no_grad()
def logits_of(core, input_ids):
    """Logits on the last stage, None on others."""
    rank, previous = dist.get_rank(), torch.empty(input_ids.size(1), input_ids.size(0), core.config.hidden_size)
    if not core.pre_process:
        dist.recv(previous, src=rank - 1)
        core.set_input_tensor(previous)
    output = core(input_ids)
    if core.post_process:
        return output
    dist.send(output.contiguous(), dst=rank + 1)
    return None


def check_grown(folder, tensor, pipeline):
    """Rows that the file lacks are the same in every layout, and padding stays behind."""
    core = build(folder, tensor, pipeline, vocab_size=GROWN)
    load_hf_weights(core, folder, mask_init="mean")
    checkpoint = HFCheckpoint(folder)
    tables = [name for name, shape in checkpoint.shapes.items() if shape[0] == checkpoint.config["vocab_size"]]
    whole = GrownCheckpoint(checkpoint, checkpoint.config, tables, GROWN, "mean")
    for name, exported in export_hf_tensors(core):
        assert torch.equal(exported, whole.tensor(name)), name


def check(folder, tensor, pipeline):
    core = build(folder, tensor, pipeline)
    load_hf_weights(core, folder)
    assert not any(parameter.isnan().any() for parameter in core.parameters())
    golden = load_file(folder / "golden.safetensors")
    logits = logits_of(core, golden["input_ids"])
    if logits is not None:
        expected = golden.get("logits_bidirectional", golden["logits"])
        assert (logits - expected).abs().max() < 2e-5
    source = {name: t for file in folder.glob("model*.safetensors") for name, t in load_file(file).items()}
    exported = dict(export_hf_tensors(core))
    assert all(torch.equal(exported[name], source[name]) for name in exported)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, set(exported))
    assert set.union(*names) == source.keys()
    if tensor > 1:
        assert exported.keys() == source.keys()


if __name__ == "__main__":
    store, rank, models = sys.argv[1:]
    torch.set_num_threads(1)
    cpu.enable_cpu_runtime()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    for name, tensor, pipeline in LAYOUTS:
        check(Path(models) / name, tensor, pipeline)
        check_grown(Path(models) / name, tensor, pipeline)
    dist.destroy_process_group()
    print("ok")
