"""Train a byte-level BPE tokenizer on texts, as a Hugging Face folder.

python docs/tutorials/train_tokenizer.py my_texts tokenizer --vocab-size 4096
"""

import argparse
from pathlib import Path

from nemo_dllm.collections.diffusion.data.text import read_text
from nemo_dllm.collections.diffusion.data.tokenizer import train_byte_bpe


def main() -> None:
    """Read, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, help="text file, or folder of them")
    parser.add_argument("folder", type=Path, help="folder to make")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens, bytes and special ones included")
    arguments = parser.parse_args()
    texts = [document.text for document in read_text(arguments.texts).documents]
    print(f"tokenizer: {train_byte_bpe(texts, arguments.vocab_size, arguments.folder)}")


if __name__ == "__main__":
    main()
