"""Trainings from a checkpoint in processes of their own, for test_start.py; the global ``job`` holds the arguments."""

import os
from functools import partial

import lightning.pytorch as pl
import nemo.lightning as nl
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo.lightning.megatron_parallel import CallbackMethods
from nemo.lightning.pytorch.optim import MegatronOptimizerModule

from nemo_dllm.collections.diffusion import cpu
from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
from nemo_dllm.collections.diffusion.models.a2d import A2DModel
from nemo_dllm.collections.diffusion.models.lora import LoRA
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.recipes.tasks import finetune, pretrain

VOCAB_SIZE = 196


class Losses(pl.Callback, CallbackMethods):
    """Keeps the loss of every step, and the weights of the last."""

    def __init__(self):
        self.losses = []

    def on_megatron_step_end(self, step, reduced):
        self.losses.append(reduced.clone())

    def on_train_end(self, trainer, pl_module):
        self.weights = {name: value.data.clone() for name, value in pl_module.module.named_parameters()}


def trainer_of(folder, rank, ranks, layout, precision, steps, callback):
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(ranks))
    dtype = {"32": torch.float32, "bf16-mixed": torch.bfloat16}[precision]
    strategy = nl.MegatronStrategy(
        ckpt_async_save=False,
        replace_progress_bar=False,
        ddp=DistributedDataParallelConfig(check_for_nan_in_grad=False, use_distributed_optimizer=True),
        pipeline_dtype=dtype,
        **layout,
    )
    strategy.store = torch.distributed.FileStore(str(folder / f"store{steps}"), ranks)
    return nl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        plugins=nl.MegatronMixedPrecision(precision, params_dtype=dtype, pipeline_dtype=dtype, autocast_enabled=False),
        callbacks=[callback],
        max_steps=steps,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )


def train(folder, rank, ranks, source, init_from, layout, steps, precision="32", save=False, adapters=False):
    """``source`` gives the sizes."""
    callback = Losses()
    config = hf_to_nemo_config(source)
    optimizer = OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=True, bf16=precision != "32")
    model = A2DModel(config, MaskedDiffusion(), optim=MegatronOptimizerModule(config=optimizer))
    checkpoints = nl.ModelCheckpoint(save_last=True, save_top_k=-1, every_n_train_steps=2, save_optim_on_train_end=True)
    task = partial(finetune, peft=LoRA(dim=4, alpha=8)) if adapters else pretrain
    task(
        model,
        MockDataModule(vocab_size=VOCAB_SIZE, seq_length=16, micro_batch_size=2, global_batch_size=4),
        trainer_of(folder, rank, ranks, layout, precision, steps, callback),
        log=nl.NeMoLogger(
            log_dir=str(folder / "log"), name="run", ckpt=checkpoints if save else None, use_datetime_version=False
        ),
        init_from=str(init_from),
    )
    kept = {
        "losses": torch.stack(callback.losses),
        "weights": callback.weights,
        "vocab_size": model.config.vocab_size,
        "mask_token_id": model.objective.mask_token_id,
    }
    torch.save(kept, folder / f"kept{steps}.{rank}")


if __name__ == "__main__":
    cpu.enable_cpu_runtime()
    try:
        train(**job)  # noqa: F821
    except Exception as error:
        (job["folder"] / f"error{job['rank']}").write_text(str(error))  # noqa: F821
        raise
