"""Diffusion language models as NeMo model classes: any ``GPTConfig`` with an objective."""

from collections.abc import Callable
from functools import partial

import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from megatron.core import parallel_state
from nemo.collections.llm.gpt.model.base import GPTConfig, GPTModel, default_layer_spec
from nemo.lightning.pytorch.optim import OptimizerModule

from nemo_dllm.collections.diffusion import cpu
from nemo_dllm.collections.diffusion.attention.layers import check_layer_choice, diffusion_block_spec
from nemo_dllm.collections.diffusion.gloo import use_few_threads_of_gloo
from nemo_dllm.collections.diffusion.models.adam import use_group_step_adam
from nemo_dllm.collections.diffusion.models.balancing import give_to_layers
from nemo_dllm.collections.diffusion.models.batch import DiffusionBatch, corrupt_batch, shard_context, to_device
from nemo_dllm.collections.diffusion.models.core import DiffusionCore, HeadOutput, Targets
from nemo_dllm.collections.diffusion.models.fsdp import is_fully_sharded, prepare_fully_sharded
from nemo_dllm.collections.diffusion.models.layout import check_layout
from nemo_dllm.collections.diffusion.models.layout_options import check_layout_options
from nemo_dllm.collections.diffusion.models.loss import DiffusionLossReduction
from nemo_dllm.collections.diffusion.models.moe_layer import adopt_moe_layers, check_balance_over
from nemo_dllm.collections.diffusion.models.saving import fill_optimizer_state, keep_write_results_in_process
from nemo_dllm.collections.diffusion.models.vocabulary import built_vocab_size, check_mask_token
from nemo_dllm.collections.diffusion.objectives import Objective


class DiffusionModel(GPTModel):
    """What the diffusion models share: corruption in the data step, a bidirectional core, (sum, count) losses.

    Args:
        config: any NeMo GPT configuration, dense or mixture of experts.
        objective: how tokens are corrupted and what is optimised.
        optim: optimizer module; NeMo's default when None.
        tokenizer: NeMo tokenizer; needed where ``config.vocab_size`` or the objective's mask token is None.
        transformer_impl: ``auto``, ``local`` or ``transformer_engine``: whose layers.
        attention_backend: ``auto``, ``sdpa``, ``te`` or ``eager``: whose attention kernel.
        balance_over: of a model with experts, the tokens whose load is balanced: ``real`` (all but pads), ``noised``
            (no clean copies of [noised | clean] rows either) or ``masked``.
        model_transform: applied to the built model before training, as NeMo's LoRA.

    Raises:
        ValueError: for an unknown or absent layer implementation, for a config whose layers are not NeMo's default
            ones, and, when it is built, for a mask token outside the vocabulary.
    """

    def __init__(
        self,
        config: GPTConfig,
        objective: Objective,
        optim: OptimizerModule | None = None,
        tokenizer=None,
        transformer_impl: str = "auto",
        attention_backend: str = "auto",
        balance_over: str = "real",
        model_transform: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
    ):
        check_layer_choice(transformer_impl, attention_backend)
        check_balance_over(balance_over)
        _check_config(config)
        use_few_threads_of_gloo()
        super().__init__(config, optim=optim, tokenizer=tokenizer, model_transform=model_transform)
        self.objective = objective
        self.transformer_impl = transformer_impl
        self.attention_backend = attention_backend
        self.balance_over = balance_over
        # Any split of a global batch into micro-batches and ranks then gives the same gradient.
        config.calculate_per_token_loss = True

    def configure_model(self, vp_stage: int | None = None) -> None:
        """Build this rank's part of the model."""
        if hasattr(self, "module"):
            return
        config = self.config
        if cpu.enable_cpu_runtime():
            cpu.prepare_model_build(config)
        use_group_step_adam()
        logical, built = built_vocab_size(config, self.tokenizer)
        check_mask_token(self.objective, self.tokenizer, logical)
        self.logical_vocab_size = logical
        config.transformer_layer_spec = partial(
            diffusion_block_spec,
            transformer_impl=self.transformer_impl,
            attention_backend=self.attention_backend,
        )
        if config.virtual_pipeline_model_parallel_size:
            # Between two stages, batched messages to the next and to the previous one would be mistaken for each other.
            config.overlap_p2p_comm, config.batch_p2p_comm = True, False
        named = config.vocab_size
        config.vocab_size = built
        super().configure_model(vp_stage)
        config.vocab_size = named
        fully_sharded = self._trainer is not None and is_fully_sharded(self._trainer.strategy)
        DiffusionCore.adopt(self.module, logical_vocab_size=logical, fully_sharded=fully_sharded)
        adopt_moe_layers(self.module, self.balance_over)
        if config.pipeline_model_parallel_size > 1 and (self.objective.block_size or self.objective.views > 1):
            # Stages exchange more positions or rows than the data module's samples have. Set here, because Megatron's
            # check of the config thinks of lengths that differ between ranks, which some expert dispatchers refuse.
            config.variable_seq_lengths = True
        if self._trainer is not None and not fully_sharded:
            _accumulate_weight_gradients_in_place(self.module)

    def setup(self, stage: str) -> None:
        """Learn the global batch size, over which times are stratified, and prepare for saving.

        Raises:
            ValueError: for blocks, or a layout of ranks, that do not fit the data or the model.
        """
        check_layout(self.config, self.objective, self.trainer, self.trainer.datamodule)
        check_layout_options(self.config, self.trainer.strategy, self.transformer_impl)
        if is_fully_sharded(self.trainer.strategy):
            prepare_fully_sharded(self.trainer.strategy)
        if not self.trainer.strategy.async_save:
            keep_write_results_in_process()
        if self.objective.group_size is None:
            self.objective.group_size = self.trainer.datamodule.global_batch_size

    def on_train_start(self) -> None:
        """Let all virtual stages of this rank draw the same noise; NeMo makes those after the first anew."""
        for chunk in self.trainer.strategy.megatron_parallel:
            chunk.objective = self.objective

    on_validation_start = on_train_start

    def forward(self, input_ids, position_ids=None, attention_mask=None, targets: Targets | None = None):
        """See :meth:`DiffusionCore.forward`."""
        return self.module(input_ids, position_ids, attention_mask, targets=targets)

    def training_data_step(self, dataloader_iter) -> DiffusionBatch:
        """Next micro-batch, corrupted by the noise of its samples."""
        return self._corrupted(dataloader_iter, validation=False)

    def validation_data_step(self, dataloader_iter) -> DiffusionBatch:
        """Next micro-batch under the fixed noise of validation."""
        return self._corrupted(dataloader_iter, validation=True)

    test_data_step = validation_data_step

    def _corrupted(self, dataloader_iter, *, validation: bool) -> DiffusionBatch:
        batch = next(dataloader_iter)
        if isinstance(batch, tuple):  # Lightning adds indices.
            batch = batch[0]
        routes = bool(self.config.num_moe_experts)
        # Drawn whole, then cut: context-parallel peers see one draw.
        batch = corrupt_batch(batch, self.objective, validation=validation, routes=routes)
        group = parallel_state.get_context_parallel_group()
        return to_device(shard_context(batch, group.rank(), group.size()))

    def forward_step(self, batch: DiffusionBatch) -> torch.Tensor | HeadOutput:
        """Hidden states of this pipeline stage, or the head's output on the last."""
        give_to_layers(batch.pattern, batch.routed)
        return self(batch.input_ids, attention_mask=batch.pattern, targets=batch.targets)

    def training_step(self, batch: DiffusionBatch, batch_idx: int | None = None) -> STEP_OUTPUT:
        """See :meth:`forward_step`."""
        return self.forward_step(batch)

    validation_step = training_step
    test_step = training_step

    @property
    def training_loss_reduction(self) -> DiffusionLossReduction:
        """Loss reduction of training steps."""
        if self._training_loss_reduction is None:
            self._training_loss_reduction = DiffusionLossReduction()
        return self._training_loss_reduction

    @property
    def validation_loss_reduction(self) -> DiffusionLossReduction:
        """Loss reduction of validation steps."""
        if self._validation_loss_reduction is None:
            self._validation_loss_reduction = DiffusionLossReduction()
        return self._validation_loss_reduction

    test_loss_reduction = validation_loss_reduction

    def log(self, name: str, value, prog_bar: bool = False, **options) -> None:
        """As Lightning's, without making every step wait for the device.

        Numbers travel from pinned memory. Lightning's progress bars get nothing: they read their values at every
        step; ``training.progress.RunProgress`` reads them at the logging interval.
        """
        if isinstance(value, int | float):
            value = torch.tensor(value, dtype=torch.float32).pin_memory().to(self.device, non_blocking=True)
        super().log(name, value, prog_bar=False, **options)

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Save what the noise depends on: a resumed run draws the same masks whatever its batch size."""
        if self._trainer is not None:
            for optimizer in self._trainer.strategy.optimizers:
                fill_optimizer_state(optimizer.mcore_optimizer)
        checkpoint["noise"] = {"seed": self.objective.seed, "group_size": self.objective.group_size}

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Go on with the noise of the saved run."""
        for field, value in checkpoint.get("noise", {}).items():
            setattr(self.objective, field, value)


def _check_config(config: GPTConfig) -> None:
    spec = getattr(config.transformer_layer_spec, "func", config.transformer_layer_spec)
    if spec not in (default_layer_spec, diffusion_block_spec):
        raise ValueError(
            f"{type(config).__name__} brings layers of its own (transformer_layer_spec={spec!r}), which bidirectional "
            "layers would replace; choose a config with NeMo's default_layer_spec"
        )


def _accumulate_weight_gradients_in_place(module: torch.nn.Module) -> None:
    """Let Transformer Engine's layers, and grouped experts, add their weight gradients to Megatron's fp32 buffers.

    They do so as they form them. Megatron's own switch, ``gradient_accumulation_fusion``, asks for an apex kernel as
    well, for the output layer; the head here does not use it.
    """
    for layer in module.modules():
        if hasattr(layer, "fuse_wgrad_accumulation"):
            layer.fuse_wgrad_accumulation = True
