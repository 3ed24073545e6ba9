"""Tokenizers: loaded from folders, or byte-level ones made on the spot and saved as ordinary Hugging Face folders."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from nemo_dllm.collections.diffusion.data.cache import cached_folder, content_key, write_folder
from nemo_dllm.collections.diffusion.data.hub import hub_or_its_cache
from nemo_dllm.collections.diffusion.model_source import is_hub_name

if TYPE_CHECKING:
    from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# Changes whenever the same texts would give another tokenizer.
TRAINER_VERSION = "1"

EOS_TOKEN = "<|endoftext|>"
MASK_TOKEN = "<|mask|>"

NUM_BYTES = 256

# Letters of what transformers says, which lists all its models at times.
MAX_REASON = 120


def train_byte_bpe(
    texts: Iterable[str], vocab_size: int, folder: str | Path, additional_special_tokens: Sequence[str] = ()
) -> Path:
    """Train a byte-level BPE tokenizer and save it; equal texts give equal files.

    Any text survives encoding and decoding unchanged. The special tokens take the last ids.

    Args:
        texts: training texts; special strings inside them are ordinary text.
        vocab_size: number of tokens, bytes and special tokens included. A short text yields fewer.
        folder: where to save; must not exist. `transformers.AutoTokenizer.from_pretrained` loads it.
        additional_special_tokens: beside the end-of-text token (also used for padding) and the mask token.

    Raises:
        ValueError: the vocabulary has no room for all bytes and special tokens.
        FileExistsError: the folder exists.
    """
    hugging_face = _train(texts, vocab_size, additional_special_tokens)
    return write_folder(Path(folder), hugging_face.save_pretrained)


def cached_byte_bpe(texts: Sequence[str], vocab_size: int, cache_dir: str | Path) -> Path:
    """Like `train_byte_bpe`, but trained once per (texts, vocab_size); returns the folder in the cache."""
    key = content_key([TRAINER_VERSION, str(vocab_size), *texts])

    def write(folder: Path) -> None:
        _train(texts, vocab_size, ()).save_pretrained(folder)

    return cached_folder(Path(cache_dir) / "tokenizers" / key, write)


def byte_tokenizer(folder: str | Path, additional_special_tokens: Sequence[str] = ()) -> Path:
    """Save a tokenizer whose ids 0 to 255 are the bytes of the UTF-8 text, followed by the special tokens.

    Raises:
        FileExistsError: the folder exists.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    hugging_face = _wrap(_byte_level_tokenizer(models.BPE(vocab=vocabulary, merges=[])), additional_special_tokens)
    return write_folder(Path(folder), hugging_face.save_pretrained)


def load_tokenizer(tokenizer: "str | Path | PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """The tokenizer itself, or the one of that folder or name.

    Raises:
        FileNotFoundError: there is no tokenizer of that name.
        NotADirectoryError: it is a file.
    """
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    with _told_in_one_line(tokenizer):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(tokenizer))


def load_nemo_tokenizer(tokenizer: "str | Path | AutoTokenizer | None") -> "AutoTokenizer":
    """NeMo's wrapper itself, or of the tokenizer of that folder or name.

    Raises:
        FileNotFoundError: there is no tokenizer of that name.
        NotADirectoryError: it is a file.
        ValueError: it is None.
    """
    if tokenizer is None:
        raise ValueError(
            "tokenizer=None: name a Hugging Face tokenizer folder, or start from a checkpoint (init_from), which has it"
        )
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    with _told_in_one_line(tokenizer):
        from nemo.collections.common.tokenizers.huggingface.auto_tokenizer import AutoTokenizer

        return AutoTokenizer(str(tokenizer))


@contextmanager
def _told_in_one_line(tokenizer: str | Path) -> Iterator[None]:
    """A name of the hub is looked for there, a path is not; what goes wrong is many lines of transformers."""
    if Path(tokenizer).is_file():
        raise NotADirectoryError(f"tokenizer='{tokenizer}' is a file; name the folder that it lies in")
    is_here = Path(tokenizer).exists()
    if not is_here and (isinstance(tokenizer, Path) or not is_hub_name(tokenizer)):
        raise FileNotFoundError(
            f"tokenizer='{tokenizer}' does not exist; name a folder with tokenizer.json, or a model of the Hugging "
            "Face Hub, as OWNER/NAME"
        )
    try:
        with nullcontext() if is_here else hub_or_its_cache(str(tokenizer)):
            yield
    except (OSError, ValueError) as error:
        if Path(tokenizer).is_dir():
            raise FileNotFoundError(
                f"tokenizer='{tokenizer}' is neither a folder with tokenizer.json nor the name of a model: it is a "
                f"folder without a tokenizer that can be read ({str(error).splitlines()[0][:MAX_REASON]})"
            ) from error
        raise FileNotFoundError(
            f"tokenizer='{tokenizer}' is neither a folder with tokenizer.json nor could it be fetched from the Hugging "
            f"Face Hub ({str(error).splitlines()[0]})"
        ) from error


def vocabulary_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """One more than the highest id that the tokenizer gives; its own length counts no holes between ids."""
    return 1 + max(tokenizer.get_vocab().values())


def tokenizer_content(tokenizer: "PreTrainedTokenizerBase") -> list[bytes]:
    """Names and contents of the files that make up the tokenizer, wherever it was loaded from."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
        return [content for file in files for content in (file.name.encode(), file.read_bytes())]


def _train(
    texts: Iterable[str], vocab_size: int, additional_special_tokens: Sequence[str]
) -> "PreTrainedTokenizerFast":
    num_special = 2 + len(additional_special_tokens)
    if vocab_size < NUM_BYTES + num_special:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for {NUM_BYTES} bytes and {num_special} special tokens; "
            f"choose at least {NUM_BYTES + num_special}"
        )
    tokenizer = _byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - num_special,
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer, additional_special_tokens)


def _byte_level_tokenizer(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte: itself where printable Latin-1, else 256, 257, ..."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(NUM_BYTES, 2 * NUM_BYTES))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(NUM_BYTES)]


def _wrap(tokenizer: Tokenizer, additional_special_tokens: Sequence[str]) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    special_tokens = (*additional_special_tokens, EOS_TOKEN, MASK_TOKEN)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN,
        mask_token=MASK_TOKEN,
        additional_special_tokens=list(additional_special_tokens),
        clean_up_tokenization_spaces=False,
    )
