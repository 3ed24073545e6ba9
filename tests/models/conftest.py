"""Small models, the same in every test of this folder."""

import runpy
from pathlib import Path

import pytest
import torch

VOCAB, MASK, LENGTH = 200, 199, 12

DENSE = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": VOCAB,
    "seq_length": LENGTH,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.2,
    "attention_softmax_in_fp32": True,
}
MIXTURE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
}


@pytest.fixture(scope="session")
def build_model(single_process):
    """Builds an MDLMModel on a small NeMo GPTConfig (4 heads, 2 groups, 2 layers); fields of both may be changed."""
    from nemo.collections.llm import GPTConfig

    from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
    from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion

    def build(
        objective=None,
        attention_backend="auto",
        transformer_impl="local",
        tokenizer=None,
        balance_over="real",
        seed=0,
        **fields,
    ):
        torch.manual_seed(seed)
        model = MDLMModel(
            GPTConfig(**{**DENSE, **fields}),
            objective or MaskedDiffusion(mask_token_id=MASK, group_size=4),
            tokenizer=tokenizer,
            attention_backend=attention_backend,
            transformer_impl=transformer_impl,
            balance_over=balance_over,
        )
        model.configure_model()
        return model

    return build


@pytest.fixture(scope="session")
def model_fields():
    """Fields of the NeMo GPTConfig of the small models: dense, and as a mixture of experts."""
    return {"dense": DENSE, "mixture of experts": DENSE | MIXTURE}


@pytest.fixture(scope="session")
def run_job(forks, tmp_path_factory):
    """Runs a function of ``script`` on each rank and returns the folder in which the ranks met.

    ``exit_code`` is what every rank must end with.
    """

    def run(function, ranks=1, exit_code=0, script="jobs.py", **arguments):
        folder = tmp_path_factory.mktemp(function)
        path = Path(__file__).with_name(script)
        processes = []
        for rank in range(ranks):
            job = {"function": function, "folder": folder, "rank": rank, "ranks": ranks, **arguments}
            process = forks.Process(target=runpy.run_path, args=(str(path), {"job": job}, "__main__"))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(timeout=300)
            if process.is_alive():
                process.kill()
        assert [process.exitcode for process in processes] == [exit_code] * ranks
        return folder

    return run
