"""Turn a GGUF file into a Hugging Face checkpoint folder.

    python docs/tutorials/gguf_to_hf.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2

It needs the extra `convert` (gguf, accelerate). Quantised weights become bf16: what their rounding took is gone.
"""

import argparse
from pathlib import Path

import torch
from gguf import GGUFReader
from tokenizers.processors import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast


def convert(gguf: Path, folder: Path) -> None:
    """Write weights, configuration, tokenizer and chat template of a GGUF file as a folder.

    Raises:
        FileExistsError: where ``folder`` exists.
    """
    folder.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    # A tokenizer read from GGUF would save the file itself as tokenizer.model. It also takes the first special token
    # for the end of a text, and puts one in front of every text, whatever the file says.
    read = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    fields = GGUFReader(gguf).fields
    if not _value(fields, "add_bos_token", default=False):
        read.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    named = {name: _value(fields, f"{key}_token_id") for name, key in _SPECIAL_TOKENS.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=read.backend_tokenizer,
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,
        **{name: read.convert_ids_to_tokens(token_id) for name, token_id in named.items() if token_id is not None},
    )
    tokenizer.chat_template = read.chat_template
    tokenizer.save_pretrained(folder)


_SPECIAL_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}


def _value(fields, name: str, default=None):
    field = fields.get(f"tokenizer.ggml.{name}")
    return default if field is None else field.contents()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path, help="made here")
    arguments = parser.parse_args()
    convert(arguments.gguf, arguments.folder)
