"""Turn an autoregressive model into block diffusion models, one per block size, and measure what the size does.

    python docs/tutorials/blocks.py runs/blocks                      # a tiny model, trained here
    python docs/tutorials/blocks.py runs/smollm2 --hf smollm2 --texts tinyshakespeare.txt

Each size starts from the same checkpoint, takes the same steps on the same rows, and is validated before and after.
Samples then come from its checkpoint, a token per pass and by confidence. OUT gets `result.json`, written after each
size, `blocks.svg`, and a NeMo run per size, as `nemo-dllm generate OUT/block_8` takes it. The same command goes on from
the sizes that are there. All sizes share one process: what takes long is to import NeMo, and to start CUDA.

Shape letters: B rows, L positions.
"""

import argparse
import gc
import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import lightning.pytorch as pl  # noqa: E402
import nemo_run as run  # noqa: E402
import torch  # noqa: E402
from block_results import WHOLE, read_result, report, write_result  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from plot_blocks import draw  # noqa: E402
from rich.console import Console  # noqa: E402
from smollm2 import Curve, read_documents, write_documents  # noqa: E402
from train_ar import VALIDATION_FRACTION, nats_per_token, read_rows, train_autoregressive  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from nemo_dllm.collections.diffusion.data.datamodule import TextDataModule  # noqa: E402
from nemo_dllm.collections.diffusion.inference import load_checkpoint  # noqa: E402
from nemo_dllm.collections.diffusion.models.a2d import A2DModel  # noqa: E402
from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel  # noqa: E402
from nemo_dllm.collections.diffusion.models.model import DiffusionModel  # noqa: E402
from nemo_dllm.collections.diffusion.objectives import BlockDiffusion, MaskedDiffusion  # noqa: E402
from nemo_dllm.collections.diffusion.sampling import generate  # noqa: E402
from nemo_dllm.collections.diffusion.single_process import single_process  # noqa: E402
from nemo_dllm.collections.diffusion.training.metrics import DiffusionMetrics  # noqa: E402
from nemo_dllm.connectors.config import hf_to_nemo_config  # noqa: E402
from nemo_dllm.recipes.builder import FUSIONS, Layout, Schedule, diffusion_recipe  # noqa: E402
from nemo_dllm.recipes.tasks import finetune  # noqa: E402

# A GPU is waited for; on a CPU the time of this thread leaves other work on the machine out.
CLOCK = time.perf_counter if torch.cuda.is_available() else time.thread_time


class Speed(pl.Callback):
    """Keeps the tokens per second of each logging interval."""

    def __init__(self):
        self.by_step: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        """Read what ``DiffusionMetrics`` has logged."""
        if trainer.global_step % trainer.log_every_n_steps == 0:
            metrics = next(c.latest for c in trainer.callbacks if isinstance(c, DiffusionMetrics))
            self.by_step[trainer.global_step] = metrics["train/tokens_per_second"]

    def fastest(self) -> float:
        """Of all intervals: the first compiles, and what other work on the machine takes is no property of a size."""
        return max(self.by_step.values())


class CountedDenoiser:
    """A denoiser whose passes are counted, those that only encode finished blocks included."""

    def __init__(self, denoiser):
        self.calls, self._denoiser, self.new_cache = 0, denoiser, denoiser.new_cache

    def score_positions(self, *arguments, **named) -> torch.Tensor:
        """A pass over the whole canvas."""
        self.calls += 1
        return self._denoiser.score_positions(*arguments, **named)

    def denoise(self, *arguments, **named) -> torch.Tensor:
        """A pass over the block at hand."""
        self.calls += 1
        return self._denoiser.denoise(*arguments, **named)

    def commit(self, *arguments, **named) -> torch.Tensor:
        """A pass over what is to be kept: the prompt, or a finished block."""
        self.calls += 1
        return self._denoiser.commit(*arguments, **named)


def diffusion_model(block_size: str, hf: Path, length: int) -> DiffusionModel:
    """The checkpoint as a model of this block size.

    It keeps the shift of its logits: position i - 1 goes on predicting token i, and the first token of a block is read
    from the clean text before it. With blocks of one token nothing changes but the loss's noise.
    """
    config = replace(hf_to_nemo_config(hf), seq_length=length, **FUSIONS)
    if block_size == WHOLE:
        return A2DModel(config, MaskedDiffusion(right_shift=True))
    return BD3LMModel(config, BlockDiffusion(block_size=int(block_size), right_shift=True))


def training_recipe(block_size: str, hf: Path, texts: Path | None, arguments: argparse.Namespace) -> run.Partial:
    """The run of one size: one device, all weights, validated before the first step and after the last."""
    recipe = diffusion_recipe(
        finetune,
        model=diffusion_model(block_size, hf, arguments.length),
        data=run.Config(
            TextDataModule,
            path=None if texts is None else str(texts),
            seq_length=arguments.length,
            micro_batch_size=arguments.micro_batch or arguments.sequences,
            global_batch_size=arguments.sequences,
            num_val_rows=arguments.val_rows,
            validation_fraction=VALIDATION_FRACTION,
            document_boundaries=False,
            cache_dir=str(arguments.out / "cache"),
        ),
        schedule=Schedule(
            max_steps=arguments.steps,
            learning_rate=arguments.lr,
            warmup_steps=arguments.steps // 10,
            validation_interval=arguments.steps,
            log_interval=max(1, min(10, arguments.steps // 4)),
        ),
        name=f"block_{block_size}",
        layout=Layout(gpus_per_node=1),
        precision="bf16" if torch.cuda.is_available() else "fp32",
        dir=str(arguments.out),
    )
    recipe.init_from = str(hf)
    recipe.trainer.num_sanity_val_steps = -1  # All validation rows, once, before the first step.
    recipe.log.ckpt.save_top_k = 0  # The last one only,
    recipe.log.ckpt.save_optim_on_train_end = False  # and of that the weights.
    return recipe


def train(block_size: str, hf: Path, texts: Path | None, arguments: argparse.Namespace) -> dict:
    """Train one size; what its validations and its clock say."""
    recipe, curve, speed = training_recipe(block_size, hf, texts, arguments), Curve(), Speed()
    recipe.trainer.callbacks = [*recipe.trainer.callbacks, curve, speed]
    run.run(recipe, direct=True)
    # The trainer's process group is one of training; sampling and the next trainer make their own, on a port of theirs.
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    os.environ.pop("MASTER_PORT", None)
    bounds = ("nll_bound", "perplexity_bound")
    before, after = ({name: row[name] for name in bounds} for row in (curve.rows[0], curve.rows[-1]))
    return {"before": before, "after": after, "train_tokens_per_second": speed.fastest()}


def sample(checkpoint: Path, prompts_BL: torch.Tensor, arguments: argparse.Namespace) -> dict:
    """Continue prompts one by one with a trained model, a token per pass and by confidence.

    Where there are blocks, the cache of finished ones is exact; masked diffusion has none.
    """
    results = {}
    with single_process():
        model = load_checkpoint(checkpoint)
        for pace, threshold in (("one_token", None), ("threshold", arguments.threshold)):
            settings = {"threshold": threshold, "temperature": arguments.temperature, "stop_at_eos": False, "seed": 0}
            config = model.sampler_config(max_new_tokens=arguments.new_tokens, **settings)
            denoiser, canvas = CountedDenoiser(model.denoiser), {"mask_token_id": model.mask_token_id}
            warm_up = replace(config, max_new_tokens=min(8, arguments.new_tokens))
            generate(denoiser, prompts_BL[:1].tolist(), warm_up, device=model.device, **canvas)
            denoiser.calls, start = 0, CLOCK()
            rows = [
                generate(denoiser, [prompt], config, row_ids=[row], device=model.device, **canvas).sequences[0].tolist()
                for row, prompt in enumerate(prompts_BL.tolist())
            ]
            tokens, seconds = len(rows) * arguments.new_tokens, CLOCK() - start
            results[pace] = {
                "tokens_per_second": tokens / seconds,
                "calls_per_token": denoiser.calls / tokens,
                "text": model.decode(rows[0]),
            }
    return results


def measure(
    block_size: str, hf: Path, texts: Path | None, prompts_BL: torch.Tensor, arguments: argparse.Namespace
) -> dict:
    """One size from its start to its samples."""
    start, folder = time.perf_counter(), arguments.out / f"block_{block_size}"
    # Of a run that was stopped: trained steps without what was measured on the way.
    shutil.rmtree(folder, ignore_errors=True)
    row = train(block_size, hf, texts, arguments)
    gc.collect()  # The trainer and its model hold each other.
    row["sampling"] = sample(folder, prompts_BL, arguments)
    return {**row, "seconds": round(time.perf_counter() - start, 1)}


def checked_size(text: str) -> str:
    """Check a block size of the command line."""
    if text != WHOLE and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text} is neither a number of tokens, 1 or more, nor {WHOLE}")
    return text


def parse(given: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the results; may be there from an earlier run")
    parser.add_argument("--hf", type=Path, help="autoregressive checkpoint; default: a tiny one is trained")
    parser.add_argument("--texts", type=Path, help="file or folder; default: the sources of Python's library")
    parser.add_argument(
        "--block-sizes",
        nargs="+",
        type=checked_size,
        default=["1", "4", "8", "16", "32", WHOLE],
        help=f"tokens per block; {WHOLE} is the row, which is masked diffusion",
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps per size")
    parser.add_argument("--sequences", type=int, default=16, help="sequences per step")
    parser.add_argument("--micro-batch", type=int, help="sequences at a time; default: all")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=3e-4, help="highest learning rate")
    parser.add_argument("--val-rows", type=int, default=256, help="validation sequences")
    parser.add_argument("--source-steps", type=int, default=400, help="optimizer steps of the tiny model")
    parser.add_argument("--prompts", type=int, default=4, help="validation sequences whose beginnings are continued")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens of a beginning")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of a continuation")
    parser.add_argument("--threshold", type=float, default=0.9, help="probability of tokens that are committed at once")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the most probable token")
    arguments = parser.parse_args(given)
    for size in arguments.block_sizes:
        if size != WHOLE and int(size) > arguments.length:
            parser.error(f"--block-sizes {size} is longer than the sequences of --length {arguments.length}")
    if arguments.hf is not None and not (arguments.hf / "config.json").is_file():
        parser.error(f"--hf {arguments.hf} is no folder of a Hugging Face checkpoint: it has no config.json")
    if arguments.prompt_tokens + arguments.new_tokens > arguments.length:
        parser.error(
            f"--prompt-tokens {arguments.prompt_tokens} and --new-tokens {arguments.new_tokens} are together longer "
            f"than the sequences of --length {arguments.length}"
        )
    return arguments


def folder_of_texts(texts: Path | None, out: Path) -> Path | None:
    """A folder with several documents, into which a single file is cut: training is split from validation by file."""
    if texts is None or texts.is_dir():
        return texts
    folder, unfinished = out / "documents", out / "documents.unfinished"
    if not folder.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        write_documents(read_documents(texts), unfinished)
        unfinished.rename(folder)
    return folder


def main(given: list[str] | None = None) -> None:
    """Measure the sizes that are not yet measured, and report all."""
    arguments = parse(given)
    out = arguments.out
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    del settings["out"], settings["block_sizes"]
    result = read_result(out / "result.json", settings)
    texts, hf, cache = folder_of_texts(arguments.texts, out), arguments.hf or out / "source", out / "cache"
    shared = {"length": arguments.length, "val_rows": arguments.val_rows, "cache": cache}
    if not hf.exists():
        train_autoregressive(hf, texts, steps=arguments.source_steps, sequences=arguments.sequences, **shared)
    rows_BL = read_rows(texts, AutoTokenizer.from_pretrained(hf), samples=1, **shared).validation_tokens()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).to(device).eval()
    nats = nats_per_token(source, rows_BL)
    result["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    result["source"] = {"nll": nats, "perplexity": math.exp(nats)}
    prompts_BL = rows_BL[: arguments.prompts, : arguments.prompt_tokens]
    for block_size in arguments.block_sizes:
        if block_size not in result["sizes"]:
            result["sizes"][block_size] = measure(block_size, hf, texts, prompts_BL, arguments)
            write_result(result, out / "result.json")
    (out / "blocks.svg").write_text(draw(result))
    Console().print(report(result))


if __name__ == "__main__":
    main()
