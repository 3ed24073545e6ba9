"""What the processes of a pool run: one global batch through the real training loop, in a layout of ranks.

Weights are a function of their names and places, so every layout trains the same model. Results are the loss and this
rank's parts of the gradients, as Megatron's checkpoints would name and place them.
"""

import functools
import zlib

import lightning.pytorch as pl
import nemo.lightning as nl
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from nemo.collections import llm
from nemo.collections.llm import GPTConfig
from nemo.lightning.megatron_parallel import CallbackMethods
from nemo.lightning.pytorch.optim import MegatronOptimizerModule
from torch.utils.data import Dataset

from nemo_dllm.collections.diffusion import cpu
from nemo_dllm.collections.diffusion.data.base_datamodule import DiffusionDataModule
from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
from nemo_dllm.collections.diffusion.models import model as model_module
from nemo_dllm.collections.diffusion.models.fsdp_state import gradient_parts
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
from nemo_dllm.collections.diffusion.training.resume import ResumeLatest

OBJECTIVES = {"mdlm": MaskedDiffusion, "bd3lm": BlockDiffusion}


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
    """Feeds given rows."""

    def __init__(self, tensors, micro_batch_size):
        super().__init__(tensors["tokens"].size(1), micro_batch_size, len(tensors["tokens"]))
        self.tensors, self.tokenizer = tensors, None

    def training_dataset(self, num_samples):
        return Rows(self.tensors, num_samples)

    def validation_dataset(self):
        return Rows(self.tensors, self.global_batch_size)


class DrawnModel(DiffusionModel):
    """With the same weights in every layout."""

    def configure_model(self, vp_stage=None):
        super().configure_model(vp_stage)
        for shard in parts(self.module):
            shard.data.detach().copy_(drawn_weights(shard))


class DoublePrecisionModel(DrawnModel):
    """In fp32 the rounding of sums in another order alone reaches a few millionths of a gradient."""

    def configure_model(self, vp_stage=None):
        super().configure_model(vp_stage)
        self.module.double()


def parts(core):
    """The parameters of a core as parts of whole tensors: Megatron's ``ShardedTensor``, whose data are views."""
    state = core.sharded_state_dict()
    apply_factories(state)
    return [value for value in nested_values(state) if isinstance(value, ShardedTensor)]


def drawn_weights(shard):
    """This part of the random tensor that belongs to the name, around 1 for norms."""
    whole = torch.randn(shard.global_shape, generator=torch.Generator().manual_seed(zlib.crc32(shard.key.encode())))
    place = tuple(slice(start, start + size) for start, size in places(shard))
    norm = "norm" in shard.key
    return whole[place].view(shard.data.shape) * 0.2 + norm


def places(shard):
    """(start, size) of the part along each axis of the whole."""
    prepended = shard.prepend_axis_num
    sizes = [1] * prepended + list(shard.local_shape)
    return list(zip(shard.global_offset, sizes, strict=True))


class Gradients(pl.Callback, CallbackMethods):
    """Keeps loss and gradients of each step; from the second step on the twin's mutation is on."""

    def __init__(self, mutate):
        self.mutate, self.kept = mutate, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 1:
            MUTATIONS[self.mutate](pl_module)

    def on_megatron_step_end(self, step, reduced):
        gradients = []
        for chunk in step.pipeline:
            if chunk.module.ddp_config.use_megatron_fsdp:
                gradients += [
                    (shard.key.removeprefix("module."), places(shard), shard.global_shape, shard.data.clone())
                    for shard in gradient_parts(chunk.module)
                ]
                continue
            share_gradients(chunk)
            core = chunk.module.module
            for parameter in core.parameters():
                parameter.kept, parameter.data = parameter.data, parameter.main_grad.to(parameter.dtype)
            gradients += [
                (shard.key, places(shard), shard.global_shape, shard.data.detach().clone()) for shard in parts(core)
            ]
            for parameter in core.parameters():
                parameter.data = parameter.kept
        self.kept.append((reduced.item(), gradients))


@functools.cache
def call_doubles_floats():
    """The distributed optimizer refuses parameters by the name of their type; it sums gradients of doubles as well."""
    cpu.enable_cpu_runtime()
    original = torch.Tensor.type

    def type_name(tensor, *arguments, **named):
        result = original(tensor, *arguments, **named)
        return result.replace("DoubleTensor", "FloatTensor") if isinstance(result, str) else result

    torch.Tensor.type = type_name
    # It would copy gradients as floats; nothing is learned here.
    DistributedOptimizer._copy_model_grads_to_main_grads = lambda optimizer: None


def share_gradients(chunk):
    """The distributed optimizer leaves each rank its share of the gradients' sum; gives all of them all."""
    ddp = chunk.module
    if not ddp.ddp_config.use_distributed_optimizer:
        return
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            share = bucket.grad_data.view(group.size(), -1)[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, share, group=group)


def noise_by_rank(pl_module):
    """Draw the noise of each process by itself."""
    pl_module.objective.seed += torch.distributed.get_rank()


def inputs_by_rank(pl_module):
    """Move the noised tokens by the rank's number: as noise by rank, but peers agree on the number of targets."""
    change_batches(lambda whole, shard: {"input_ids": shard.input_ids.roll(torch.distributed.get_rank(), 1)})


def counts_of_every_rank(pl_module):
    """Let context-parallel ranks all count a sample's tokens."""
    change_batches(lambda whole, shard: {"count": whole.count})


def change_batches(change):
    shard_context = model_module.shard_context

    def changed(whole, *ranks):
        shard = shard_context(whole, *ranks)
        return shard._replace(**change(whole, shard))

    model_module.shard_context = changed


MUTATIONS = {function.__name__: function for function in (noise_by_rank, inputs_by_rank, counts_of_every_rank)}


def trainer_of(ranks, store, layout, *, distributed, ddp=(), enable_checkpointing=False, **fields):
    """A trainer whose ranks meet in the file ``store``; ``layout`` are fields of the strategy, ``fields`` its own."""
    strategy = nl.MegatronStrategy(
        ckpt_async_save=False,
        ckpt_optim_fully_reshardable=True,
        replace_progress_bar=False,
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=False, use_distributed_optimizer=distributed, **dict(ddp)
        ),
        **layout,
    )
    strategy.store = torch.distributed.FileStore(store, ranks)
    return nl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        logger=False,
        enable_checkpointing=enable_checkpointing,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **fields,
    )


def gradients(
    rank,
    ranks,
    store,
    rows,
    config,
    objective,
    layout,
    micro_batch_size,
    mutate,
    double,
    distributed=False,
    overlap=False,
):
    """One step in a layout, and one as its mutated twin, with learning rate 0.

    Args:
        store: file in which the ranks meet.
        config: fields of the ``GPTConfig``.
        objective: kind and fields.
        layout: fields of Megatron's strategy.
        mutate: key of ``MUTATIONS``.
        double: in double precision, else in fp32.
        distributed: use the distributed optimizer.
        overlap: reduce gradients and gather weights while others are computed.

    Returns:
        For each step the loss and a list of parts of gradients: name, places, shape of the whole, values.
    """
    torch.manual_seed(0)
    if distributed and double:
        call_doubles_floats()
    shard_context = model_module.shard_context
    kind, fields = objective
    callback = Gradients(mutate)
    optimizer = OptimizerConfig(optimizer="adam", lr=0.0, clip_grad=0.0, use_distributed_optimizer=distributed)
    model = (DoublePrecisionModel if double else DrawnModel)(
        GPTConfig(**config),
        OBJECTIVES[kind](mask_token_id=199, force_mask=True, **fields),
        optim=MegatronOptimizerModule(optimizer),
    )
    trainer = trainer_of(
        ranks,
        store,
        layout,
        plugins=nl.MegatronMixedPrecision(
            "32", grad_reduce_in_fp32=False, pipeline_dtype=torch.float64 if double else torch.float32
        ),
        max_steps=2,
        callbacks=[callback],
        distributed=distributed,
        ddp={"overlap_grad_reduce": overlap, "overlap_param_gather": overlap},
    )
    try:
        trainer.fit(model, RowsDataModule(rows, micro_batch_size))
    finally:
        model_module.shard_context = shard_context
    return callback.kept


def workers(**arguments):
    """Threads for the collectives of each process group that :func:`gradients` has made."""
    gradients(**arguments)
    groups = torch.distributed.distributed_c10d._world.pg_map
    return [group._get_backend(torch.device("cpu")).options._threads for group in groups]


class Steps(pl.Callback, CallbackMethods):
    """Keeps inputs and loss of each step, by its number."""

    def __init__(self):
        self.kept, self.inputs = {}, []

    def on_megatron_microbatch_start(self, step, batch):
        self.inputs.append(batch.input_ids)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.kept[trainer.global_step] = outputs["loss"].item(), torch.cat(self.inputs)
        self.inputs = []


def train(rank, ranks, store, folder, config, objective, layout, last_step, distributed):
    """Goes on from the latest checkpoint in a folder to a step, in a layout, and saves there.

    Returns:
        (loss, inputs) of each step, by its number.
    """
    torch.manual_seed(0)
    kind, fields = objective
    callback = Steps()
    llm.pretrain(
        model=DrawnModel(GPTConfig(**config), OBJECTIVES[kind](**fields)),
        data=MockDataModule(vocab_size=200, seq_length=24, micro_batch_size=2, global_batch_size=4, num_val_rows=4),
        trainer=trainer_of(
            ranks,
            store,
            layout,
            plugins=nl.MegatronMixedPrecision("32"),
            max_steps=last_step,
            callbacks=[callback],
            enable_checkpointing=True,
            distributed=distributed,
        ),
        log=nl.NeMoLogger(
            name="run",
            log_dir=folder,
            use_datetime_version=False,
            ckpt=nl.ModelCheckpoint(
                every_n_train_steps=2, save_top_k=-1, save_last=False, monitor="step", save_optim_on_train_end=True
            ),
        ),
        optim=MegatronOptimizerModule(
            OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.1, use_distributed_optimizer=distributed)
        ),
        resume=ResumeLatest(),
    )
    return callback.kept
