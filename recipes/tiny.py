"""A masked diffusion model small enough for a laptop: the quickstart and the tests."""

import nemo_run as run
from nemo.collections import llm

from nemo_dllm.collections.diffusion.data.datamodule import TextDataModule
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
from nemo_dllm.recipes.builder import FUSIONS, Layout, Schedule, diffusion_recipe, register
from nemo_dllm.recipes.tasks import pretrain


def mdlm_tiny(path: str | None = None, dir: str | None = None, name: str = "mdlm_tiny") -> run.Partial:
    """Pretrain a masked diffusion model of a few million parameters on text, on the CPU or one GPU.

    Args:
        path: text file or folder; None reads the sources of Python's standard library.
        dir: folder of the run's folder.
        name: of the run.

    Examples:
        ``nemo llm pretrain --factory mdlm_tiny --yes``

        >>> run.run(mdlm_tiny(path="my_texts"), direct=True)
    """
    model = run.Config(
        MDLMModel,
        config=run.Config(
            llm.Qwen3Config,
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
        ),
        objective=run.Config(MaskedDiffusion),
    )
    data = run.Config(
        TextDataModule, path=path, vocab_size=2048, seq_length=128, micro_batch_size=16, global_batch_size=16,
        num_val_rows=128,
    )  # fmt: skip
    schedule = Schedule(max_steps=500, learning_rate=3e-3, warmup_steps=50, validation_interval=125, weight_decay=0.01)
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


register(mdlm_tiny, target=llm.pretrain, name="mdlm_tiny")
