"""As jobs.py, for models with experts."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from nemo.collections.llm import GPTConfig
from nemo.lightning.megatron_parallel import CallbackMethods

from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.models.moe_layer import moe_layers
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion
from nemo_dllm.collections.diffusion.training.expert_load import ExpertLoad

sys.path.insert(0, str(Path(__file__).parent))
from jobs import RowsDataModule, optimizer_of, trainer_of

# Biases of the four experts, far out of balance.
START = (0.2, 0.1, -0.1, -0.2)


class FixedWeights:
    """Layouts draw weights differently; here routers see embeddings alone, with weights of their own."""

    def configure_model(self, vp_stage=None):
        super().configure_model(vp_stage)
        for layer in moe_layers(self.module):
            weight = layer.router.weight
            drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(layer.layer_number))
            weight.data.copy_(0.05 * drawn)
            if layer.router.expert_bias is not None:
                layer.router.expert_bias.copy_(torch.tensor(START))
        for name, parameter in self.module.named_parameters():
            if "linear_proj" in name or "linear_fc2" in name:
                parameter.data.zero_()


class SameInEveryLayout(FixedWeights, MDLMModel):
    """With such weights."""


class SameBlocksInEveryLayout(FixedWeights, BD3LMModel):
    """With such weights."""


class BiasRecorder(pl.Callback):
    """Keeps the biases of all layers and the metrics after each step."""

    def __init__(self, load):
        self.load, self.kept = load, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        biases = [layer.router.expert_bias for layer in moe_layers(trainer.model)]
        kept = {"metrics": self.load.latest}
        if biases[0] is not None:
            kept["biases"] = torch.stack(biases).clone()
        self.kept.append(kept)


def balance(folder, rank, ranks, layout, micro_batch_size, rows, config, steps):
    """Trains with learning rate 0, so that nothing but the biases of experts moves."""
    torch.manual_seed(0)
    model = SameInEveryLayout(GPTConfig(**config), MaskedDiffusion(mask_token_id=199), optim=optimizer_of(0.0))
    load = ExpertLoad()
    recorder = BiasRecorder(load)
    trainer = trainer_of(folder, rank, ranks, layout, max_steps=steps, callbacks=[load, recorder], log_every_n_steps=1)
    trainer.fit(model, RowsDataModule(rows, micro_batch_size, len(rows["tokens"])))
    torch.save(recorder.kept, folder / f"kept{rank}")


class RouterGradients(pl.Callback, CallbackMethods):
    """Keeps the gradients of this rank's routers, by layer, before the optimizer sees them."""

    def on_megatron_step_end(self, step, reduced):
        layers = moe_layers(step.trainer.model)
        self.kept = {layer.layer_number: layer.router.weight.main_grad.clone() for layer in layers}


def router_gradients(folder, rank, ranks, layout, micro_batch_size, rows, config):
    """One step; only the router's losses reach the routers, as experts give out zeros."""
    torch.manual_seed(0)
    objective = BlockDiffusion(mask_token_id=199, block_size=4)
    model = SameBlocksInEveryLayout(GPTConfig(**config), objective, optim=optimizer_of(0.0, clip_grad=0.0))
    gradients = RouterGradients()
    trainer = trainer_of(folder, rank, ranks, layout, max_steps=1, callbacks=[gradients])
    trainer.fit(model, RowsDataModule(rows, micro_batch_size, len(rows["tokens"])))
    torch.save(gradients.kept, folder / f"gradients{rank}")


if __name__ == "__main__":
    globals()[job.pop("function")](**job)  # noqa: F821
