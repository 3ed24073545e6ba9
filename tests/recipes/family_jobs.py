"""One training of a family's recipe in a process of its own; ``job`` holds the arguments of :func:`train`."""

import nemo_run as run
import torch

import nemo_dllm.recipes  # noqa: F401
from nemo_dllm.collections.diffusion import cpu
from nemo_dllm.collections.diffusion.data.mock_datamodule import MockDataModule
from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.facts import read_facts
from nemo_dllm.connectors.families.registry import find_family
from nemo_dllm.connectors.hf_export import export_hf_checkpoint
from nemo_dllm.recipes.builder import RECIPES, set_precision

SEQ_LENGTH = 16


def shrink(recipe, hf_config, added_mask_token_id):
    """The recipe for a tiny checkpoint, on the CPU.

    ``added_mask_token_id`` is for one that declares none: the recipe's own is larger than its vocabulary.
    """
    for name, value in find_family(hf_config).config.to_nemo(hf_config).items():
        if value is not None:
            setattr(recipe.model.config, name, value)
    recipe.model.config.seq_length = recipe.data.seq_length = SEQ_LENGTH
    if added_mask_token_id is not None:
        recipe.model.objective.mask_token_id = added_mask_token_id
    if recipe.data.__fn_or_cls__ is MockDataModule:
        recipe.data.vocab_size = hf_config["vocab_size"]
    recipe.data.micro_batch_size, recipe.data.global_batch_size, recipe.data.num_val_rows = 2, 4, 4
    strategy = recipe.trainer.strategy
    strategy.tensor_model_parallel_size = strategy.pipeline_model_parallel_size = 1
    strategy.expert_model_parallel_size = strategy.expert_tensor_parallel_size = 1
    strategy.sequence_parallel = strategy.ddp.overlap_grad_reduce = strategy.ddp.overlap_param_gather = False
    recipe.trainer.devices = recipe.trainer.num_nodes = 1
    recipe.trainer.max_steps = recipe.trainer.val_check_interval = 2
    recipe.optim.lr_scheduler.warmup_steps = 1
    set_precision(recipe, "fp32")


def train(recipe_name, checkpoint, folder, mask_token_id, objective):
    recipe = RECIPES[recipe_name](init_from=str(checkpoint), dir=str(folder), name="run")
    declares_none = read_facts(checkpoint).declared_mask_token_id is None
    shrink(recipe, HFCheckpoint(checkpoint).config, mask_token_id if declares_none else None)
    for name, value in objective.items():
        setattr(recipe.model.objective, name, value)
        setattr(recipe.data, name, value)
    run.run(recipe, direct=True)
    (last,) = (folder / "run" / "checkpoints").glob("*-last")
    export_hf_checkpoint(last, folder / "hf")


if __name__ == "__main__":
    torch.set_num_threads(1)
    cpu.enable_cpu_runtime()
    train(**job)  # noqa: F821
