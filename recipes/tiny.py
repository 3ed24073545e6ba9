"""Diffusion models small enough for a laptop: the quickstart and the tests."""

import nemo_run as run
from nemo.collections import llm
from nemo.collections.llm.gpt.model.qwen3 import Qwen3MoEConfig

from nemo_dllm.collections.diffusion.data.datamodule import TextDataModule
from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
from nemo_dllm.recipes.builder import FUSIONS, Layout, Schedule, diffusion_recipe, register
from nemo_dllm.recipes.datasets import pretraining_data
from nemo_dllm.recipes.moe_fields import SOFTMAX_PRETRAINING, SOFTMAX_ROUTER
from nemo_dllm.recipes.tasks import pretrain


def mdlm_tiny(
    path: str | None = None, dir: str | None = None, name: str = "mdlm_tiny", tokenizer: str | None = None
) -> run.Partial:
    """Pretrain a masked diffusion model of a few million parameters on text, on the CPU or one GPU.

    Args:
        path: text file or folder, or prefix of a corpus in .bin and .idx files; None reads the sources of Python's
            standard library.
        dir: folder of the run's folder.
        name: of the run.
        tokenizer: Hugging Face folder or name; None trains one on the text, which a corpus has no more.

    Examples:
        ``nemo llm pretrain --factory mdlm_tiny --yes``

        >>> run.run(mdlm_tiny(path="my_texts"), direct=True)
    """
    return _tiny(MDLMModel, run.Config(MaskedDiffusion), path, dir, name, tokenizer, max_steps=500)


def bd3lm_tiny(
    path: str | None = None, dir: str | None = None, name: str = "bd3lm_tiny", tokenizer: str | None = None
) -> run.Partial:
    """Pretrain a block diffusion model of a few million parameters on text, on the CPU or one GPU.

    Args:
        path, dir, name, tokenizer: see :func:`mdlm_tiny`.

    Examples:
        ``nemo llm pretrain --factory bd3lm_tiny --yes``
    """
    objective = run.Config(BlockDiffusion, block_size=8)
    return _tiny(BD3LMModel, objective, path, dir, name, tokenizer, max_steps=200)


def mdlm_moe_tiny(
    path: str | None = None, dir: str | None = None, name: str = "mdlm_moe_tiny", tokenizer: str | None = None
) -> run.Partial:
    """Pretrain a masked diffusion model with eight experts on text, on the CPU or one GPU.

    Args:
        path, dir, name, tokenizer: see :func:`mdlm_tiny`.

    Examples:
        ``nemo llm pretrain --factory mdlm_moe_tiny --yes``
    """
    experts = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 288}
    return _tiny(
        MDLMModel,
        run.Config(MaskedDiffusion),
        path,
        dir,
        name,
        tokenizer,
        max_steps=200,
        config_class=Qwen3MoEConfig,
        **{**SOFTMAX_ROUTER, **SOFTMAX_PRETRAINING, **experts},
    )


def _tiny(
    model_class,
    objective: run.Config,
    path,
    dir,
    name,
    tokenizer,
    max_steps: int,
    config_class: type = llm.Qwen3Config,
    **fields,
) -> run.Partial:
    model = run.Config(
        model_class,
        config=run.Config(
            config_class,
            num_layers=4,
            hidden_size=192,
            ffn_hidden_size=576,
            num_attention_heads=4,
            num_query_groups=2,
            kv_channels=48,
            seq_length=128,
            vocab_size=None,
            make_vocab_size_divisible_by=1,
            share_embeddings_and_output_weights=True,
            **FUSIONS,
            **fields,
        ),
        objective=objective,
    )
    sizes = {"seq_length": 128, "micro_batch_size": 16, "global_batch_size": 16, "num_val_rows": 128}
    data = pretraining_data(path, tokenizer, argument="path", **sizes)
    data.document_boundaries = False
    if data.__fn_or_cls__ is TextDataModule:
        data.vocab_size = 2048
    schedule = Schedule(
        max_steps=max_steps,
        learning_rate=3e-3,
        warmup_steps=max_steps // 10,
        validation_interval=max_steps // 4,
        weight_decay=0.01,
    )
    return diffusion_recipe(
        pretrain,
        model=model,
        data=data,
        schedule=schedule,
        name=name,
        layout=Layout(gpus_per_node=1),
        precision="fp32",
        dir=dir,
    )


for _recipe in (mdlm_tiny, bd3lm_tiny, mdlm_moe_tiny):
    register(_recipe, target=llm.pretrain, name=_recipe.__name__)
