"""Fine-tune a checkpoint on questions with answers, in its chat template, and let it answer others before and after.

    python docs/tutorials/chat.py smollm2 gsm8k_train.jsonl gsm8k_test.jsonl --out runs/chat

An autoregressive checkpoint becomes a masked diffusion model on the way. Lines of the files have `question` and
`answer`. OUT gets `imported` and `run` (NeMo's: what `nemo-dllm chat` takes), `answers.jsonl` and `result.json`.
"""

import argparse
import itertools
import json
import re
import time
from dataclasses import replace
from pathlib import Path

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import nemo_run as run  # noqa: E402
import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from nemo.collections import llm  # noqa: E402

import nemo_dllm.connectors.importers  # noqa: E402, F401
from nemo_dllm.collections.diffusion.chat_prompts import ChatTemplate  # noqa: E402
from nemo_dllm.collections.diffusion.data.documents import records_of  # noqa: E402
from nemo_dllm.collections.diffusion.data.sources import find_sources  # noqa: E402
from nemo_dllm.collections.diffusion.inference.session import open_session  # noqa: E402
from nemo_dllm.collections.diffusion.models.a2d import A2DModel  # noqa: E402
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion  # noqa: E402
from nemo_dllm.collections.diffusion.sampling import generate  # noqa: E402
from nemo_dllm.connectors.config import hf_to_nemo_config  # noqa: E402
from nemo_dllm.recipes.builder import FUSIONS, Layout, Schedule, diffusion_recipe  # noqa: E402
from nemo_dllm.recipes.datasets import supervised_data  # noqa: E402
from nemo_dllm.recipes.tasks import finetune  # noqa: E402

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def unbuilt_model(arguments: argparse.Namespace) -> A2DModel:
    """The model that the checkpoint describes, as a masked diffusion model."""
    return A2DModel(replace(hf_to_nemo_config(arguments.hf), seq_length=arguments.length, **FUSIONS), MaskedDiffusion())


def training_recipe(arguments: argparse.Namespace, imported: Path) -> run.Partial:
    """The run: one device, the weights and the tokenizer of the imported checkpoint."""
    recipe = diffusion_recipe(
        finetune,
        model=unbuilt_model(arguments),
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
    recipe.init_from = str(imported)
    recipe.log.ckpt.save_top_k = 0  # The last one only,
    recipe.log.ckpt.save_optim_on_train_end = False  # and of that the weights.
    return recipe


def read_questions(file: Path, number: int) -> list[dict]:
    """The first lines of a file.

    Raises:
        ValueError: a line has no question or no answer, which names it, or there is none.
    """
    [source] = find_sources([file])
    records = list(itertools.islice(records_of(source), number))
    if not records:
        raise ValueError(f"{file} has no question to ask, or --questions={number} asks none")
    for record in records:
        if record.problem or not {"question", "answer"} <= record.fields.keys():
            raise ValueError(f"{file}:{record.number}: {record.problem or 'there is no question or no answer'}")
    return [record.fields for record in records]


def last_number(text: str) -> float | None:
    """The last number of a text; GSM8K's answers end with theirs."""
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def is_right(said: str, expected: str) -> bool:
    """Whether both texts end with the same number."""
    return last_number(said) is not None and last_number(said) == last_number(expected)


def answer_questions(checkpoint: Path, questions: list[str], arguments: argparse.Namespace) -> list[str]:
    """What a model says to each question, in a conversation of its own; many at a time."""
    settings = {"max_new_tokens": arguments.max_new_tokens, "block_size": arguments.block_size, "seed": 0}
    session = open_session(checkpoint, best=False, preset=None, settings=settings)
    model, template = session.model, ChatTemplate(session.model.tokenizer.tokenizer)
    config = replace(session.config, stop_token_ids=(*session.config.stop_token_ids, *template.end_token_ids))
    said: list[str] = []
    for start in range(0, len(questions), arguments.batch):
        turns = [[{"role": "user", "content": question}] for question in questions[start : start + arguments.batch]]
        prompts = [template.prompt(turn, {}) for turn in turns]
        result = generate(model.denoiser, prompts, config, decode=model.decode, **session.canvas())
        said += [model.decode(completion.tolist()).strip() for completion in result.completions]
    return said


def main() -> None:
    """Import, train, ask, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf", type=Path, help="folder of an autoregressive checkpoint with a chat template")
    parser.add_argument("train", type=Path, help=".jsonl with question and answer")
    parser.add_argument("test", type=Path, help="the same")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps")
    parser.add_argument("--sequences", type=int, default=32, help="sequences per step")
    parser.add_argument("--length", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=3e-4, help="highest learning rate")
    parser.add_argument("--val-rows", type=int, default=32, help="validation sequences")
    parser.add_argument("--questions", type=int, default=200, help="test questions to ask")
    parser.add_argument("--max-new-tokens", type=int, default=192, help="tokens of an answer at most")
    parser.add_argument("--block-size", type=int, default=32, help="tokens that are denoised together")
    parser.add_argument("--batch", type=int, default=100, help="questions to ask at a time")
    arguments = parser.parse_args()
    started = time.perf_counter()
    items = read_questions(arguments.test, arguments.questions)
    source = f"hf://{arguments.hf.resolve()}"
    imported = llm.import_ckpt(unbuilt_model(arguments), source=source, output_path=arguments.out / "imported")
    run.run(training_recipe(arguments, imported), direct=True)
    # The trainer's process group is one of training; sampling makes its own.
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    expected, questions = ([item[name] for item in items] for name in ("answer", "question"))
    result: dict = {"questions": len(items)}
    answers = [dict(item) for item in items]
    for name, checkpoint in (("before", imported), ("after", arguments.out / "run")):
        said = answer_questions(checkpoint, questions, arguments)
        right = list(map(is_right, said, expected))
        result[name] = {"right": sum(right), "share": sum(right) / len(items)}
        answers = [{**answer, name: {"said": a, "right": r}} for answer, a, r in zip(answers, said, right, strict=True)]
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result["seconds"] = round(time.perf_counter() - started, 1)
    (arguments.out / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    (arguments.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    for answer in answers[:3]:
        print(f"{answer['question']}\n  before: {answer['before']['said'][:200]!r}\n  after: {answer['after']['said']}")
    for name in ("before", "after"):
        print(f"right {name}: {result[name]['right']} of {len(items)} ({result[name]['share']:.1%})")


if __name__ == "__main__":
    main()
