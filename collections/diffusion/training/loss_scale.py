"""Loss scaling for fp16 weights, whose small gradients would be lost."""

import lightning.pytorch as pl


class LossScale(pl.Callback):
    """Multiplies the loss by the scale that Megatron's optimizer divides the gradients by.

    NeMo sets the scale up and leaves the multiplication out: gradients would be 2^32 times too small. Does nothing
    under any other precision.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Hand the optimizer's scale to Megatron's backward pass."""
        if trainer.precision_plugin.dtype_config.fp16:
            # Adapters get their optimizer later than this.
            pl_module.config.grad_scale_func = lambda loss: trainer.optimizers[0].mcore_optimizer.scale_loss(loss)
