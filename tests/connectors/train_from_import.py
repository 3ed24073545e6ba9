"""Import a checkpoint, train two steps from it and export the result, run as a script.

Arguments: source, output, and, where biases of experts follow the load, the rate.
"""

import sys
from pathlib import Path

import nemo.lightning.io.pl
import torch
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm

import nemo_dllm.connectors.importers  # noqa: F401
from nemo_dllm.collections.diffusion import cpu
from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
from nemo_dllm.collections.diffusion.models.a2d import A2DModel
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion
from nemo_dllm.connectors.config import hf_to_nemo_config
from nemo_dllm.connectors.facts import read_facts

LEARNING_RATE, STEPS = 1e-3, 2


def train(source: Path, folder: Path, bias_update_rate: float = 0.0) -> None:
    model_class = A2DModel if read_facts(source).attention == "causal" else MDLMModel
    model = model_class(hf_to_nemo_config(source), MaskedDiffusion())
    imported = llm.import_ckpt(model, source=f"hf://{source}", output_path=folder / "imported")
    config = hf_to_nemo_config(source)
    config.moe_router_bias_update_rate = bias_update_rate
    optimizer = OptimizerConfig(optimizer="adam", lr=LEARNING_RATE, use_distributed_optimizer=False)
    llm.train(
        # A new model, that knows nothing of the import but its path.
        model_class(config, MaskedDiffusion(), optim=nl.MegatronOptimizerModule(config=optimizer)),
        MockDataModule(tokenizer=model.tokenizer, seq_length=16, micro_batch_size=2, global_batch_size=2),
        nl.Trainer(
            devices=1,
            accelerator="cpu",
            max_steps=STEPS,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            logger=False,
            strategy=nl.MegatronStrategy(ckpt_async_save=False),
            plugins=nl.MegatronMixedPrecision("32", params_dtype=torch.float32, pipeline_dtype=torch.float32),
        ),
        log=nl.NeMoLogger(
            log_dir=str(folder / "log"),
            ckpt=nl.ModelCheckpoint(save_last=True, every_n_train_steps=STEPS, save_top_k=-1),
            use_datetime_version=False,
        ),
        resume=nl.AutoResume(restore_config=nl.RestoreConfig(path=str(imported))),
    )
    (trained,) = (path for path in (folder / "log").rglob("*-last") if path.is_dir())
    llm.export_ckpt(trained, target="hf", output_path=folder / "exported")


if __name__ == "__main__":
    torch.set_num_threads(1)
    if cpu.enable_cpu_runtime():
        # NeMo asserts after every load that CUDA was initialised.
        nemo.lightning.io.pl._fix_tensors_device = lambda checkpoint: checkpoint
    train(Path(sys.argv[1]), Path(sys.argv[2]), *map(float, sys.argv[3:]))
