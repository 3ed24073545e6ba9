"""Fine-tune a checkpoint on questions with answers, in its chat template, and let it answer others.

    python docs/tutorials/chat.py smollm2 gsm8k_train.jsonl gsm8k_test.jsonl --out runs/chat

An autoregressive checkpoint becomes a masked diffusion model on the way. Lines of the files have `question` and
`answer`. OUT gets `run` (NeMo's: what `nemo-dllm chat` takes), `answers.jsonl` and `result.json`.
"""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import nemo_run as run  # noqa: E402
import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402

from nemo_dllm.collections.diffusion.inference.chat import Chat  # noqa: E402
from nemo_dllm.collections.diffusion.inference.session import open_session  # noqa: E402
from nemo_dllm.collections.diffusion.models.a2d import A2DModel  # noqa: E402
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion  # noqa: E402
from nemo_dllm.connectors.config import hf_to_nemo_config  # noqa: E402
from nemo_dllm.recipes.builder import FUSIONS, Layout, Schedule, diffusion_recipe  # noqa: E402
from nemo_dllm.recipes.datasets import supervised_data  # noqa: E402
from nemo_dllm.recipes.tasks import finetune  # noqa: E402

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def training_recipe(arguments: argparse.Namespace) -> run.Partial:
    """The run: one device, the weights and the tokenizer of the checkpoint."""
    config = replace(hf_to_nemo_config(arguments.hf), seq_length=arguments.length, **FUSIONS)
    recipe = diffusion_recipe(
        finetune,
        model=A2DModel(config, MaskedDiffusion()),
        data=supervised_data(
            str(arguments.train),
            None,
            # Where an answer ends is for the model to say, in a canvas that has room for more.
            supervise_padding=True,
            seq_length=arguments.length,
            micro_batch_size=arguments.sequences,
            global_batch_size=arguments.sequences,
            num_val_rows=arguments.val_rows,
        ),
        schedule=Schedule(
            max_steps=arguments.steps,
            learning_rate=arguments.lr,
            warmup_steps=min(50, arguments.steps // 10),
            validation_interval=max(1, arguments.steps // 4),
        ),
        name="run",
        layout=Layout(gpus_per_node=1),
        precision="bf16" if torch.cuda.is_available() else "fp32",
        dir=str(arguments.out),
    )
    recipe.data.columns = {"prompt": "question", "completion": "answer"}
    recipe.data.pad_to_multiple_of = 64
    recipe.data.cache_dir = str(arguments.out / "cache")
    recipe.init_from = str(arguments.hf)
    recipe.log.ckpt.save_top_k = 0  # The last one only,
    recipe.log.ckpt.save_optim_on_train_end = False  # and of that the weights.
    return recipe


def last_number(text: str) -> float | None:
    """The last number of a text; GSM8K's answers end with theirs."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def answer_questions(arguments: argparse.Namespace) -> list[dict]:
    """Ask the model, each question on its own."""
    settings = {"max_new_tokens": arguments.max_new_tokens, "block_size": arguments.block_size}
    session = open_session(arguments.out / "run", best=False, preset=None, settings=settings, watch=False, replay=None)
    answers = []
    for line in arguments.test.read_text().splitlines()[: arguments.questions]:
        item = json.loads(line)
        said = Chat(session).answer(item["question"])
        correct = last_number(said) is not None and last_number(said) == last_number(item["answer"])
        answers.append({"question": item["question"], "expected": item["answer"], "said": said, "correct": correct})
        print(f"{'right' if correct else 'wrong'}: {item['question']}\n  {said}", flush=True)
    return answers


def main() -> None:
    """Train, ask, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf", type=Path, help="folder of an autoregressive checkpoint with a chat template")
    parser.add_argument("train", type=Path, help=".jsonl with question and answer")
    parser.add_argument("test", type=Path, help="the same")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--sequences", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=2e-4, help="highest learning rate")
    parser.add_argument("--val-rows", type=int, default=32, help="validation sequences")
    parser.add_argument("--questions", type=int, default=50, help="test questions to ask")
    parser.add_argument("--max-new-tokens", type=int, default=192, help="tokens of an answer at most")
    parser.add_argument("--block-size", type=int, default=32, help="tokens that are denoised together")
    arguments = parser.parse_args()
    run.run(training_recipe(arguments), direct=True)
    # The trainer's process group is one of training; sampling makes its own.
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    answers = answer_questions(arguments)
    (arguments.out / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    right = sum(answer["correct"] for answer in answers)
    (arguments.out / "result.json").write_text(json.dumps({"questions": len(answers), "right": right}) + "\n")
    print(f"right: {right} of {len(answers)}")


if __name__ == "__main__":
    main()
