"""Training runs in processes of their own: what a test asks for is in the global ``job``, a dict.

``job["function"]`` names the function here that takes the rest. Results are files in a folder of the test.
"""

import multiprocessing
import os
import signal
from dataclasses import dataclass

import lightning.pytorch as pl
import nemo.lightning as nl
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo.collections import llm
from nemo.collections.llm import GPTConfig
from nemo.lightning.megatron_parallel import CallbackMethods
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
from torch.utils.data import Dataset

from nemo_dllm.collections.diffusion.data.base_datamodule import DiffusionDataModule
from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
from nemo_dllm.collections.diffusion.models.loss import DiffusionLossReduction
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
from nemo_dllm.collections.diffusion.training.resume import ResumeLatest
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.load import export_hf_tensors, load_hf_weights


class Rows(Dataset):
    """Sample i is row i of each tensor, modulo their length."""

    def __init__(self, tensors, num_samples):
        self.tensors, self.num_samples = tensors, num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        row = index % len(self.tensors["tokens"])
        return {name: tensor[row] for name, tensor in self.tensors.items()} | {"sample_index": torch.tensor(index)}


class RowsDataModule(DiffusionDataModule):
    """Feeds given rows, for training and for validation."""

    def __init__(self, tensors, micro_batch_size, global_batch_size):
        super().__init__(tensors["tokens"].size(1), micro_batch_size, global_batch_size)
        self.tensors, self.tokenizer = tensors, None

    def training_dataset(self, num_samples):
        return Rows(self.tensors, num_samples)

    def validation_dataset(self):
        return Rows(self.tensors, self.global_batch_size)


def trainer_of(folder, rank=0, ranks=1, layout=None, **fields):
    """A trainer on ``ranks`` processes that meet in ``folder``; ``layout`` are fields of Megatron's strategy."""
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", RANK=str(rank), WORLD_SIZE=str(ranks))
    strategy = nl.MegatronStrategy(
        ckpt_async_save=False,
        replace_progress_bar=False,
        ddp=DistributedDataParallelConfig(check_for_nan_in_grad=False),
        pipeline_dtype=torch.float32,
        **(layout or {}),
    )
    strategy.store = torch.distributed.FileStore(str(folder / "store"), ranks)
    return nl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": ranks,
            "strategy": strategy,
            "plugins": nl.MegatronMixedPrecision("32"),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
        }
        | fields
    )


def optimizer_of(lr, distributed=False, lr_scheduler=None, **fields):
    config = OptimizerConfig(optimizer="adam", lr=lr, use_distributed_optimizer=distributed, **fields)
    return MegatronOptimizerModule(config, lr_scheduler=lr_scheduler)


class DoublePrecisionMDLM(MDLMModel):
    """In fp32 the rounding of sums in another order alone reaches a few millionths of a gradient."""

    def configure_model(self, vp_stage=None):
        super().configure_model(vp_stage)
        self.module.double()


class DividedPerMicroBatch(DiffusionLossReduction):
    """The mutated twin of handing over sum and count: a mean of means."""

    def forward(self, batch, forward_out):
        total, count, report = super().forward(batch, forward_out)
        return total / count, torch.ones_like(count), report


class GradientsOfSteps(pl.Callback, CallbackMethods):
    """Gives each step a loss norm and a loss reduction, and keeps its gradients before the optimizer sees them."""

    def __init__(self, steps):
        self.steps, self.gradients = steps, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        pl_module.objective.loss_norm, reduction = self.steps[trainer.global_step]
        pl_module._training_loss_reduction = globals()[reduction]()

    def on_megatron_step_end(self, step, reduced):
        module = step.pipeline.module.module
        gradients = {name: parameter.main_grad.clone() for name, parameter in module.named_parameters()}
        self.gradients.append(gradients | {"loss": reduced.clone()})


def gradients(folder, rank, ranks, micro_batch_size, rows, config, steps):
    """Trains with learning rate 0, a step for each (loss norm, loss reduction); writes the gradients of each."""
    torch.manual_seed(0)
    callback = GradientsOfSteps(steps)
    objective = MaskedDiffusion(mask_token_id=199, force_mask=True)
    model = DoublePrecisionMDLM(GPTConfig(**config), objective, optim=optimizer_of(0.0, clip_grad=0.0))
    plugin = nl.MegatronMixedPrecision("32", grad_reduce_in_fp32=False)
    trainer = trainer_of(folder, rank, ranks, max_steps=len(steps), callbacks=[callback], plugins=plugin)
    trainer.fit(model, RowsDataModule(rows, micro_batch_size, len(rows["tokens"])))
    torch.save(callback.gradients, folder / f"gradients{rank}")


@dataclass
class RecordedNoise:
    """Recorded draws in place of an objective's own: sample i takes row i of each."""

    time: torch.Tensor = None
    uniforms: torch.Tensor = None

    def corrupt(self, tokens_BL, loss_mask_BL, sample_index_B, *, document_BL=None, validation=False):
        noise = {"time": self.time[sample_index_B], "uniforms_BL": self.uniforms[sample_index_B]}
        return super().corrupt(tokens_BL, loss_mask_BL, sample_index_B, document_BL=document_BL, **noise)


@dataclass
class RecordedMaskedDiffusion(RecordedNoise, MaskedDiffusion):
    """With recorded draws."""


@dataclass
class RecordedBlockDiffusion(RecordedNoise, BlockDiffusion):
    """With recorded draws."""


class FromCheckpoint:
    """A model that starts from the weights of a Hugging Face checkpoint."""

    hf_path = None

    def configure_model(self, vp_stage=None):
        super().configure_model(vp_stage)
        load_hf_weights(self.module, self.hf_path)


class MDLMFromCheckpoint(FromCheckpoint, MDLMModel):
    """From a checkpoint."""


class BD3LMFromCheckpoint(FromCheckpoint, BD3LMModel):
    """From a checkpoint."""


RECORDED = {
    "mdlm": (MDLMFromCheckpoint, RecordedMaskedDiffusion),
    "bd3lm": (BD3LMFromCheckpoint, RecordedBlockDiffusion),
}


class Trajectory(pl.Callback, CallbackMethods):
    """Keeps what the model saw, losses, gradients and weights, the latter two under their Hugging Face names."""

    def __init__(self):
        self.kept = {"inputs": [], "losses": [], "gradients": [], "weights": []}

    def on_megatron_microbatch_start(self, step, batch):
        self.kept["inputs"].append(batch.input_ids)

    def on_megatron_step_end(self, step, reduced):
        core = step.pipeline.module.module.module
        weights = {name: parameter.data.clone() for name, parameter in core.named_parameters()}
        for parameter in core.parameters():
            parameter.data.copy_(parameter.main_grad)
        self.kept["gradients"].append(dict(export_hf_tensors(core)))
        for name, parameter in core.named_parameters():
            parameter.data.copy_(weights[name])
        self.kept["losses"].append(reduced.clone())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.kept["weights"].append(dict(export_hf_tensors(pl_module.module.module)))


def trajectory(folder, rank, ranks, layout, micro_batch_size, hf_path, rows, noise, kind, objective, optimizer, steps):
    """Trains on given rows and draws, in their order; writes what :class:`Trajectory` keeps."""
    callback = Trajectory()
    model_class, objective_class = RECORDED[kind]
    model = model_class(
        hf_to_nemo_config(hf_path),
        objective_class(**objective, **noise),
        optim=optimizer_of(clip_grad=0.0, **optimizer),
    )
    model.hf_path = hf_path
    trainer = trainer_of(folder, rank, ranks, layout, max_steps=steps, callbacks=[callback])
    trainer.fit(model, RowsDataModule(rows, micro_batch_size, len(rows["tokens"]) // steps))
    torch.save(callback.kept, folder / f"trajectory{rank}")


def weights_of(pl_module):
    return {name: parameter.data.clone() for name, parameter in pl_module.module.named_parameters()}


class StepRecorder(pl.Callback, CallbackMethods):
    """Writes what each step saw and left behind, and ends the process without warning at the start of a step."""

    def __init__(self, folder, rank, killed_after=None):
        self.folder, self.rank, self.killed_after, self.inputs = folder, rank, killed_after, []

    def on_train_start(self, trainer, pl_module):
        torch.save(weights_of(pl_module), self.folder / f"start.{self.rank}")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.killed_after:
            children = " ".join(str(child.pid) for child in multiprocessing.active_children())
            (self.folder / f"children.{self.rank}").write_text(children)
            os.kill(os.getpid(), signal.SIGKILL)
        self.inputs = []

    def on_megatron_microbatch_start(self, step, batch):
        self.inputs.append(batch.input_ids)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        kept = {
            "loss": outputs["loss"].clone(),
            "inputs": torch.cat(self.inputs),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "weights": weights_of(pl_module),
        }
        torch.save(kept, self.folder / f"step{trainer.global_step}.{self.rank}")


def train_rows(folder, rank, ranks, micro_batch_size, rows, config, steps, distributed):
    """Trains on given rows, without weight decay; see :class:`StepRecorder`."""
    model = MDLMModel(
        GPTConfig(**config), MaskedDiffusion(mask_token_id=199), optim=optimizer_of(1e-2, distributed, weight_decay=0.0)
    )
    trainer = trainer_of(folder, rank, ranks, max_steps=steps, callbacks=[StepRecorder(folder, rank)])
    trainer.fit(model, RowsDataModule(rows, micro_batch_size, len(rows["tokens"]) // steps))


def train(
    folder,
    rank,
    ranks,
    run_folder,
    config,
    micro_batch_size=2,
    global_batch_size=4,
    distributed=False,
    validation=False,
    seed=1234,
    killed_after=None,
):
    """Ten steps with a checkpoint after every five, going on from the latest one in ``run_folder``."""
    torch.manual_seed(0)
    recorder = StepRecorder(folder, rank, killed_after)
    trainer = trainer_of(
        folder,
        rank,
        ranks,
        max_steps=10,
        callbacks=[recorder],
        enable_checkpointing=True,
        val_check_interval=3,
        limit_val_batches=1.0 if validation else 0,
    )
    llm.pretrain(
        model=MDLMModel(GPTConfig(**config), MaskedDiffusion(seed=seed)),
        data=MockDataModule(
            vocab_size=200,
            seq_length=12,
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            num_val_rows=4,
        ),
        trainer=trainer,
        log=nl.NeMoLogger(
            name="run",
            log_dir=str(run_folder),
            use_datetime_version=False,
            ckpt=nl.ModelCheckpoint(every_n_train_steps=5, save_top_k=-1, save_last=False, monitor="step"),
        ),
        optim=optimizer_of(
            1e-2,
            distributed,
            weight_decay=0.1,
            lr_scheduler=CosineAnnealingScheduler(warmup_steps=3, constant_steps=0, min_lr=1e-3),
        ),
        resume=ResumeLatest(),
    )


if __name__ == "__main__":
    globals()[job.pop("function")](**job)  # noqa: F821
