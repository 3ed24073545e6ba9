"""Which data module reads a data set that a recipe is given, with what the model needs of it.

``sizes`` are the fields that all data modules share: ``seq_length``, ``micro_batch_size``, ``global_batch_size`` and
``num_val_rows``.
"""

from pathlib import Path

import nemo_run as run

from nemo_dllm.collections.diffusion.data.datamodule import TextDataModule
from nemo_dllm.collections.diffusion.data.pretraining_datamodule import PretrainingDataModule
from nemo_dllm.collections.diffusion.data.supervised_datamodule import SupervisedDataModule


def check_tokenizer(dataset: str | None, tokenizer: str | None, init_from: str | None) -> None:
    """Check that the tokens of a data set can only be those of one tokenizer.

    Raises:
        ValueError: for a tokenizer beside a checkpoint, which brings one, and for a data set with neither.
    """
    if tokenizer is not None and init_from is not None:
        raise ValueError(
            f"tokenizer={tokenizer} and init_from={init_from}: the checkpoint brings its own tokenizer; leave "
            "tokenizer out"
        )
    if dataset is not None and tokenizer is None and init_from is None:
        raise ValueError(
            f"dataset={dataset} needs a tokenizer: set tokenizer (a Hugging Face folder or name), or init_from (a "
            "checkpoint, which brings its own)"
        )


def pretraining_data(
    dataset: str | None,
    tokenizer: str | None,
    *,
    argument: str = "dataset",
    bos_token_id: int | None = None,
    **sizes: int,
) -> run.Config:
    """Data for pretraining.

    Args:
        dataset: prefix of a corpus in .bin and .idx files, or a text file or folder; None is the text of Python's
            standard library.
        tokenizer: Hugging Face folder or name; None is that of the checkpoint which the run starts from, or one that is
            trained on the text.
        argument: of the recipe that the data set was given as, for errors.
        bos_token_id: put before each document of a corpus, for models that predict a token from its left neighbour.
        sizes: see above.

    Raises:
        ValueError: its name is empty, which would be the working folder.
        FileNotFoundError: the data set is neither.
    """
    if dataset == "":
        raise ValueError(f"{argument}='' is empty; name a text file or folder, or leave {argument} out")
    prefix = str(dataset or "").removesuffix(".idx").removesuffix(".bin")
    if dataset is not None and Path(f"{prefix}.idx").is_file():
        return run.Config(PretrainingDataModule, paths=prefix, tokenizer=tokenizer, bos_token_id=bos_token_id, **sizes)
    if dataset is not None and not Path(dataset).exists():
        raise FileNotFoundError(
            f"{argument}={dataset} is neither a text file or folder, nor the prefix of a corpus ({dataset}.idx); name "
            "one that is there"
        )
    return run.Config(TextDataModule, path=dataset, tokenizer=tokenizer, document_boundaries=True, **sizes)


def supervised_data(
    dataset: str | None,
    tokenizer: str | None,
    *,
    block_size: int | None = None,
    supervise_padding: bool = False,
    **sizes: int,
) -> run.Config:
    """Data for fine-tuning.

    Args:
        dataset: chats, prompts with completions or instructions: a file, a folder or ``hf://NAME``; None is a few
            questions, enough to see that a run starts.
        tokenizer: as of :func:`pretraining_data`; conversations take its chat template.
        block_size: of the block diffusion objective.
        supervise_padding: pads are trained end tokens.
        sizes: see above.
    """
    data = run.Config(
        SupervisedDataModule,
        path=dataset,
        tokenizer=tokenizer,
        block_size=block_size,
        supervise_padding=supervise_padding,
        **sizes,
    )
    if dataset is None:
        data.chat_template = ""
    return data
