"""Turn an autoregressive checkpoint into a masked diffusion model of your text, and measure what that does.

    python docs/tutorials/smollm2.py smollm2 tinyshakespeare.txt --out runs/shakespeare
    python docs/tutorials/smollm2.py smollm2 gsm8k_train.jsonl --out runs/gsm8k

Imports the checkpoint, trains all its weights, validates before, during and after, and exports the result. OUT gets
`curve.csv` and `result.json` (see plot_curves.py), `hf` (the exported checkpoint) and `run` (NeMo's).
"""

import argparse
import csv
import json
import math
import time
from dataclasses import replace
from pathlib import Path

from nemo_dllm.console import import_nemo_quietly

import_nemo_quietly()

import fiddle as fdl  # noqa: E402
import lightning.pytorch as pl  # noqa: E402
import nemo_run as run  # noqa: E402
import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from nemo.collections import llm  # noqa: E402
from nemo.lightning import RestoreConfig  # noqa: E402

import nemo_dllm.connectors.importers  # noqa: E402, F401
from nemo_dllm.collections.diffusion.data.datamodule import TextDataModule  # noqa: E402
from nemo_dllm.collections.diffusion.inference import locate_checkpoint  # noqa: E402
from nemo_dllm.collections.diffusion.models.a2d import A2DModel  # noqa: E402
from nemo_dllm.collections.diffusion.objectives import MaskedDiffusion  # noqa: E402
from nemo_dllm.collections.diffusion.training.metrics import DiffusionMetrics  # noqa: E402
from nemo_dllm.connectors.config import hf_to_nemo_config  # noqa: E402
from nemo_dllm.recipes.builder import FUSIONS, Layout, Schedule, diffusion_recipe  # noqa: E402
from nemo_dllm.recipes.tasks import finetune  # noqa: E402

# Characters of a document that is cut from a longer text.
DOCUMENT_LENGTH = 4000


def read_documents(file: Path) -> list[str]:
    """Documents of a file: a question and its answer per line of .jsonl, else paragraphs joined to pages.

    Raises:
        ValueError: for lines of .jsonl without the fields question and answer.
    """
    if file.suffix == ".jsonl":
        items = [json.loads(line) for line in file.read_text().splitlines()]
        if any({"question", "answer"} - item.keys() for item in items):
            raise ValueError(f"{file} has lines without the fields question and answer; give those, or plain text")
        return [f"Question: {item['question']}\nAnswer: {item['answer']}\n" for item in items]
    documents = [""]
    for paragraph in file.read_text().split("\n\n"):
        if len(documents[-1]) > DOCUMENT_LENGTH:
            documents.append("")
        documents[-1] += paragraph + "\n\n"
    return documents


def write_documents(documents: list[str], folder: Path) -> None:
    """One file per document: the data module splits training from validation by file."""
    folder.mkdir(parents=True)
    for index, document in enumerate(documents):
        (folder / f"{index:05d}.txt").write_text(document)


class Curve(pl.Callback):
    """Keeps the likelihood of the validation rows, and the seconds of training that led there."""

    def __init__(self):
        self.rows: list[dict[str, float]] = []
        self._training = 0.0
        self._since: float | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module, batch, batch_idx) -> None:
        """Start the clock, which stands still for validations and the checkpoint."""
        self._since = time.perf_counter() if self._since is None else self._since

    def on_validation_start(self, trainer: pl.Trainer, pl_module) -> None:
        """Stop the clock."""
        self._stop()

    def on_save_checkpoint(self, trainer: pl.Trainer, pl_module, checkpoint: dict) -> None:
        """Stop the clock."""
        self._stop()

    def on_validation_end(self, trainer: pl.Trainer, pl_module) -> None:
        """Add a row; the first is that of the untrained model."""
        metrics = next(c.latest for c in trainer.callbacks if isinstance(c, DiffusionMetrics))
        row = {
            "step": trainer.global_step,
            "tokens": trainer.global_step * trainer.datamodule.global_batch_size * trainer.datamodule.seq_length,
            "seconds": round(self._training, 2),
            "nll_bound": metrics["validation/nll_bound"],
            "perplexity_bound": metrics["validation/perplexity_bound"],
            "bits_per_byte": metrics["validation/bits_per_byte"],
        }
        self.rows.append(row)
        print(f"step {row['step']}: perplexity at most {row['perplexity_bound']:,.2f} per token", flush=True)

    def _stop(self) -> None:
        if self._since is not None:
            self._training += time.perf_counter() - self._since
            self._since = None


def training_recipe(model: A2DModel, imported: Path, documents: Path, arguments: argparse.Namespace) -> run.Partial:
    """The run: one device, validation before the first step, one checkpoint at the end."""
    recipe = diffusion_recipe(
        finetune,
        model=model,
        data=run.Config(
            TextDataModule,
            path=str(documents),
            tokenizer=model.tokenizer,
            seq_length=arguments.length,
            micro_batch_size=arguments.sequences,
            global_batch_size=arguments.sequences,
            num_val_rows=arguments.val_rows,
            cache_dir=str(arguments.out / "cache"),
        ),
        schedule=Schedule(
            max_steps=arguments.steps,
            learning_rate=arguments.lr,
            warmup_steps=min(50, arguments.steps // 10),
            validation_interval=max(1, arguments.steps // arguments.validations),
        ),
        name="run",
        layout=Layout(gpus_per_node=1),
        precision="bf16" if torch.cuda.is_available() else "fp32",
        dir=str(arguments.out),
    )
    recipe.resume.restore_config = run.Config(RestoreConfig, path=str(imported))
    recipe.trainer.num_sanity_val_steps = -1  # All validation rows, once, before the first step.
    recipe.log.ckpt.every_n_train_steps = arguments.steps
    recipe.log.ckpt.save_top_k = 0  # The last one only,
    recipe.log.ckpt.save_optim_on_train_end = False  # and of that the weights.
    return recipe


def unbuilt_model(hf: Path, length: int) -> A2DModel:
    """The model that a checkpoint describes, for sequences of ``length`` tokens."""
    return A2DModel(replace(hf_to_nemo_config(hf), seq_length=length, **FUSIONS), MaskedDiffusion())


@torch.no_grad()
def autoregressive_nll(hf: Path, data: TextDataModule) -> float:
    """Nats per token that the checkpoint itself, from left to right, takes for the same validation rows."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).to(device).eval()
    total = count = 0
    for row in range(data.validation_dataset().num_rows):
        tokens_1L = data.validation_dataset()[row]["tokens"][None].to(device)
        logits_LV = model(tokens_1L).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits_LV, tokens_1L[0, 1:], reduction="sum").item()
        count += len(logits_LV)
    return total / count


def main() -> None:
    """Import, train, export, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hf", type=Path, help="folder of an autoregressive Hugging Face checkpoint")
    parser.add_argument("text", type=Path, help=".txt, or .jsonl with question and answer")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps")
    parser.add_argument("--sequences", type=int, default=32, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=3e-4, help="highest learning rate")
    parser.add_argument("--val-rows", type=int, default=64, help="validation sequences")
    parser.add_argument("--validations", type=int, default=10, help="validations during training")
    arguments = parser.parse_args()
    started = time.perf_counter()
    write_documents(read_documents(arguments.text), arguments.out / "documents")

    model = unbuilt_model(arguments.hf, arguments.length)
    imported = llm.import_ckpt(model, source=f"hf://{arguments.hf.resolve()}", output_path=arguments.out / "imported")
    recipe = training_recipe(model, imported, arguments.out / "documents", arguments)
    curve = Curve()
    recipe.trainer.callbacks = [*recipe.trainer.callbacks, curve]
    task = fdl.build(recipe)
    task()
    # The trainer's process group is one of GPUs; the export works on the CPU and makes its own.
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    exported = llm.export_ckpt(
        locate_checkpoint(arguments.out / "run").path, target="hf", output_path=arguments.out / "hf"
    )

    ar_nll = autoregressive_nll(arguments.hf, task.keywords["data"])
    with open(arguments.out / "curve.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=curve.rows[0].keys())
        writer.writeheader()
        writer.writerows(curve.rows)
    result = {
        "text": arguments.text.stem,
        "before": curve.rows[0],
        "after": curve.rows[-1],
        "best": min(curve.rows, key=lambda row: row["nll_bound"]),
        "autoregressive_source": {"nll": ar_nll, "perplexity": math.exp(ar_nll)},
        "curve": curve.rows,
        "settings": {name: value for name, value in vars(arguments).items() if not isinstance(value, Path)},
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "seconds": round(time.perf_counter() - started, 1),
    }
    (arguments.out / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"before: perplexity at most {result['before']['perplexity_bound']:,.2f} per token")
    print(f"after:  perplexity at most {result['after']['perplexity_bound']:,.2f} per token")
    print(f"the autoregressive source, from left to right: {math.exp(ar_nll):,.2f}")
    print(f"exported: {exported}")


if __name__ == "__main__":
    main()
