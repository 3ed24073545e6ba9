"""Train a small autoregressive Llama on texts with plain PyTorch and transformers, as a Hugging Face folder.

python docs/tutorials/train_ar.py runs/ar --texts my_texts

Tokens, rows and the split into training and validation are those of `TextDataModule`, so that a diffusion model which
starts from the folder is validated on text that neither has been trained on.

Shape letters: B rows, L positions, V vocabulary.
"""

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from nemo_dllm.collections.diffusion.data import (
    PackedTextDataset,
    ValidationDataset,
    cached_byte_bpe,
    cached_tokens,
    read_text,
    split_documents,
    standard_library_sources,
)

VALIDATION_FRACTION = 0.05
SEED = 1234
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


class Rows(NamedTuple):
    """Token rows of a text."""

    train: PackedTextDataset
    validation: ValidationDataset

    def validation_tokens(self) -> torch.Tensor:
        """All validation rows, int64 [B, L]."""
        return torch.stack([self.validation[row]["tokens"] for row in range(self.validation.num_rows)])


def split_texts(texts: Path | None) -> tuple[list[str], list[str]]:
    """Training and validation documents of a file or folder; of Python's standard library for None."""
    corpus = standard_library_sources() if texts is None else read_text(texts)
    split = split_documents(corpus.documents, VALIDATION_FRACTION)
    return [document.text for document in split.train], [document.text for document in split.validation]


def read_rows(
    texts: Path | None, tokenizer: PreTrainedTokenizerBase, *, length: int, samples: int, val_rows: int, cache: Path
) -> Rows:
    """Rows of ``length`` tokens: ``samples`` for training, in the order of training, and up to ``val_rows`` others."""
    train, validation = (cached_tokens(part, tokenizer, cache).tokens for part in split_texts(texts))
    return Rows(PackedTextDataset(train, length, samples, SEED), ValidationDataset(validation, length, val_rows))


@torch.no_grad()
def nats_per_token(model: LlamaForCausalLM, tokens_BL: torch.Tensor) -> float:
    """Mean negative log-likelihood of the tokens behind the first of each row."""
    total = 0.0
    for part_BL in tokens_BL.to(model.device).split(4):
        logits_BLV = model(part_BL).logits[:, :-1].float()
        total += F.cross_entropy(logits_BLV.flatten(0, 1), part_BL[:, 1:].flatten(), reduction="sum").item()
    return total / tokens_BL[:, 1:].numel()


def train_autoregressive(
    folder: Path,
    texts: Path | None,
    *,
    vocab_size: int = 2048,
    steps: int = 400,
    sequences: int = 16,
    length: int = 128,
    val_rows: int = 64,
    lr: float = 3e-3,
    cache: Path,
) -> float:
    """Train tokenizer and model and write both to ``folder``, which appears when all is in it.

    Returns:
        Nats per token on the validation rows.
    """
    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(cached_byte_bpe(split_texts(texts)[0], vocab_size, cache))
    sizes = {"length": length, "samples": steps * sequences, "val_rows": val_rows}
    rows = read_rows(texts, tokenizer, **sizes, cache=cache)
    torch.manual_seed(SEED)
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(**SIZES, **tokens, max_position_embeddings=length, tie_word_embeddings=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    # Up along a line, then down to a tenth along a cosine.
    warmup = max(1, steps // 10)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    for step in range(steps):
        batch = [rows.train[step * sequences + row]["tokens"] for row in range(sequences)]
        tokens_BL = torch.stack(batch).to(device)
        logits_BLV = model(tokens_BL).logits[:, :-1].float()
        loss = F.cross_entropy(logits_BLV.flatten(0, 1), tokens_BL[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if (step + 1) % max(1, steps // 5) == 0:
            print(f"step {step + 1}/{steps}: {loss.item():.3f} nats per token", flush=True)
    nats = nats_per_token(model.eval(), rows.validation_tokens())
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    unfinished.rename(folder)
    seconds = time.perf_counter() - start
    print(f"{model.num_parameters():,} parameters, {nats:.3f} nats per token on other text, {seconds:.0f} s: {folder}")
    return nats


def main() -> None:
    """Parse the command line, train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to make")
    parser.add_argument("--texts", type=Path, help="text file or folder; default: the sources of Python's library")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens, bytes and special ones included")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--sequences", type=int, default=16, help="sequences per step")
    parser.add_argument("--length", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    arguments = vars(parser.parse_args())
    folder, texts = arguments.pop("folder"), arguments.pop("texts")
    train_autoregressive(folder, texts, **arguments, cache=folder.with_name(f"{folder.name}_cache"))


if __name__ == "__main__":
    main()
