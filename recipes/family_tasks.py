"""What a family's recipes do with a model: pretrain it, fine-tune all its weights, or adapters of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import nemo_run as run
from nemo.collections import llm

from nemo_dllm.collections.diffusion.models.lora import ATTENTION_LAYERS, LoRA
from nemo_dllm.recipes import tasks
from nemo_dllm.recipes.builder import Schedule

FINETUNE = Schedule(max_steps=2_000, learning_rate=2e-5, warmup_steps=100, validation_interval=200)
ADAPT = replace(FINETUNE, learning_rate=2e-4)


@dataclass(frozen=True)
class Task:
    """A command, what it runs, and how its recipes are described."""

    run: Callable
    command: Callable
    summary: str
    dataset: str
    """What it trains on."""
    tuning: Schedule | None = None
    """Of fine-tuning, on questions and answers; pretraining's depends on size and start."""
    adapters: Mapping[str, object] | None = None
    """Fields of ``LoRA``; None trains all weights."""


_CONVERSATIONS = "file or folder of chats, prompts with completions or instructions; None is a few questions"
TASKS = {
    "pretrain": Task(
        tasks.pretrain,
        llm.pretrain,
        "Pretrain {purpose}.",
        "prefix of .bin and .idx files, or text file or folder; None is random tokens",
    ),
    "finetune": Task(
        tasks.finetune,
        llm.finetune,
        "Fine-tune {purpose}, all weights.",
        _CONVERSATIONS,
        tuning=FINETUNE,
    ),
    "lora": Task(
        tasks.finetune,
        llm.finetune,
        "Fine-tune {purpose}, low-rank adapters of its linear layers.",
        _CONVERSATIONS,
        tuning=ADAPT,
        adapters={"dim": 32, "alpha": 64, "dropout": 0.0},
    ),
}


def set_adapters(recipe: run.Partial, task: Task) -> None:
    """Let a recipe train the adapters of a task that has them: of all linear layers, but of routed experts'."""
    if task.adapters is None:
        return
    config = recipe.model.config
    has_experts = getattr(config, "num_moe_experts", None) is not None
    layers = {"target_modules": list(ATTENTION_LAYERS)} if has_experts else {}
    recipe.peft = run.Config(LoRA, **task.adapters, **layers)
