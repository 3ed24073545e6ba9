"""One of two ranks that load checkpoints with experts in several layouts, run as a script: store rank models.

Fails where a rank reads more than it holds, where logits are not the golden ones, or the export is not the checkpoint.
Prints ``ok`` last.
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

# Sizes of Megatron's parallel dimensions; those not named are 1.
LAYOUTS = (
    ("qwen3_moe", {"expert_model_parallel_size": 2}),
    ("llada2_moe", {"expert_model_parallel_size": 2}),
    ("llada2_moe", {"tensor_model_parallel_size": 2}),
    (
        "llada2_moe",
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    ),
    ("llada_moe_dense_shared", {"tensor_model_parallel_size": 2}),
    ("llada_moe", {"pipeline_model_parallel_size": 2}),
)


def build(folder, layout):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**layout)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = hf_to_nemo_config(folder)
    for field, value in layout.items():
        setattr(config, field, value)
    config.expert_tensor_parallel_size = parallel_state.get_expert_tensor_parallel_world_size()
    config.pipeline_dtype = torch.float32
    model = MDLMModel(config, MaskedDiffusion(mask_token_id=196))
    model.configure_model()
    for tensor in [*model.module.parameters(), *model.module.buffers()]:
        tensor.data.fill_(float("nan"))
    return model.module.eval()


def load_what_it_holds(core, folder):
    """Load; every element that was read is one that this rank keeps, and experts are its own."""
    read, names = [], set()
    original = HFCheckpoint.tensor

    def watched(self, name, *args, **kwargs):
        part = original(self, name, *args, **kwargs)
        read.append(part.numel())
        names.add(name)
        return part

    HFCheckpoint.tensor = watched
    load_hf_weights(core, folder)
    HFCheckpoint.tensor = original
    held = [value for value in core.state_dict().values() if value is not None]
    assert not any(value.isnan().any() for value in held)
    assert sum(read) == sum(value.numel() for value in held)
    per_rank = core.config.num_moe_experts // core.config.expert_model_parallel_size
    first = parallel_state.get_expert_model_parallel_rank() * per_rank
    experts = {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name}
    assert experts == set(range(first, first + per_rank))


@torch.no_grad()
def logits_of(core, input_ids):
    """Logits on the last stage, None on others."""
    rank = dist.get_rank()
    if not core.pre_process:
        previous = torch.empty(input_ids.size(1), input_ids.size(0), core.config.hidden_size)
        dist.recv(previous, src=rank - 1)
        core.set_input_tensor(previous)
    output = core(input_ids)
    if core.post_process:
        return output
    dist.send(output.contiguous(), dst=rank + 1)
    return None


def check(folder, layout):
    core = build(folder, layout)
    load_what_it_holds(core, folder)
    golden = load_file(folder / "golden.safetensors")
    logits = logits_of(core, golden["input_ids"])
    if logits is not None:
        expected = golden.get("logits_bidirectional", golden["logits"])
        assert (logits - expected).abs().max() < 2e-5, (folder.name, layout)
    source = load_file(folder / "model.safetensors")
    exported = dict(export_hf_tensors(core))
    assert all(torch.equal(exported[name], source[name]) for name in exported)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, set(exported))
    assert set.union(*names) == source.keys()
    if layout.get("expert_model_parallel_size", 1) > 1:
        shared = set.intersection(*names)
        assert not [name for name in shared if ".experts." in name]


if __name__ == "__main__":
    store, rank, models = sys.argv[1:]
    torch.set_num_threads(1)
    cpu.enable_cpu_runtime()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    for name, layout in LAYOUTS:
        check(Path(models) / name, layout)
    dist.destroy_process_group()
    print("ok")
