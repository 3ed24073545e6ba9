"""One rank of the small model split over tensor-parallel ranks; what it runs is in the global ``job``, a dict.

Writes, for each batch, the loss, the logits, the gradient of this rank's embedding rows, and how many positions the
last layer's MLP saw on this rank.
"""

import torch
from megatron.core import parallel_state, tensor_parallel
from nemo.collections.llm import GPTConfig

from nemo_dllm.collections.diffusion import cpu
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion


def run(folder, rank, ranks, config, batches, patterns):
    torch.set_num_threads(1)
    cpu.enable_cpu_runtime()
    store = torch.distributed.FileStore(str(folder / "store"), ranks)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(0)
    model = MDLMModel(GPTConfig(**config), MaskedDiffusion(mask_token_id=199, group_size=4), transformer_impl="local")
    model.configure_model()
    core = model.module.double()
    positions = []
    core.decoder.layers[-1].mlp.register_forward_hook(lambda module, inputs, output: positions.append(len(inputs[0])))
    results = []
    for (tokens, targets), pattern in zip(batches, patterns, strict=True):
        core.zero_grad(set_to_none=True)
        loss = core(tokens, attention_mask=pattern, targets=targets).loss_sum
        loss.backward()
        with torch.no_grad():
            logits = core(tokens, attention_mask=pattern)
        grad = core.embedding.word_embeddings.weight.grad.clone()
        results.append({"loss": loss.detach(), "logits": logits, "grad": grad, "positions": positions[-1]})
    torch.save(results, folder / f"rank{rank}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(**job)  # noqa: F821
