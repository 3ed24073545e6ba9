"""Output heads that are the embedding table, in files that hold that table once or twice."""

import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from nemo_dllm.connectors.checkpoint_files import HFCheckpoint
from nemo_dllm.connectors.family import Family
from nemo_dllm.connectors.safetensors_writer import TensorHeader
from nemo_dllm.connectors.stacked_experts import StackedExperts
from nemo_dllm.connectors.vocabulary_growth import GrownCheckpoint, vocabulary_tables

_ROWS_COMPARED_AT_ONCE = 8192
_TIE = "share_embeddings_and_output_weights"


def check_tied_head(checkpoint: HFCheckpoint | StackedExperts | GrownCheckpoint, family: Family, config) -> None:
    """Refuse a file whose head is not the embedding that its config.json says it is.

    Args:
        checkpoint: what is read.
        family: its family.
        config: NeMo's configuration.

    Raises:
        ValueError: where they differ.
    """
    embedding, head = _names(family, config)
    if not config.share_embeddings_and_output_weights or head not in checkpoint.shapes:
        return
    same = checkpoint.shapes[embedding] == checkpoint.shapes[head]
    for start in range(0, checkpoint.shapes[embedding][0] if same else 0, _ROWS_COMPARED_AT_ONCE):
        rows = slice(start, start + _ROWS_COMPARED_AT_ONCE)
        same = same and torch.equal(checkpoint.tensor(embedding, rows), checkpoint.tensor(head, rows))
    if not same:
        raise ValueError(
            f"{checkpoint.path}: config.json ties the head to the embeddings, but {head} differs from {embedding}; "
            f"set {family.config.hf_name(_TIE)} to false there, or remove the tensor"
        )


def absent_head(names: Iterable[str], family: Family, config) -> list[str]:
    """What to do about a head that a checkpoint with these tensors lacks; empty where it has one, or needs none."""
    embedding, head = _names(family, config)
    if config.share_embeddings_and_output_weights or head in names or embedding not in names:
        return []
    return [
        f"  config.json says that the head is not tied to the embeddings; if it is, set "
        f"{family.config.hf_name(_TIE)} to true there"
    ]


def repeats_head(checkpoint: HFCheckpoint, family: Family) -> bool:
    """Whether a checkpoint with a tied head holds it as a tensor of its own too."""
    if not family.config.value(_TIE, checkpoint.config):
        return False
    return _names(family, family.build_nemo_config(checkpoint.config))[1] in checkpoint.shapes


def repeat_head(
    family: Family, config, headers: Mapping[str, TensorHeader], tensors: Iterable[tuple[str, Tensor]]
) -> tuple[dict[str, TensorHeader], Iterator[tuple[str, Tensor]]]:
    """Headers and (name, tensor) pairs of an export with a tied head, and that head as a tensor of its own."""
    embedding, head = _names(family, config)

    def repeated() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            yield name, tensor
            if name == embedding:
                yield head, tensor

    return {**headers, head: headers[embedding]}, repeated()


def _names(family: Family, config) -> tuple[str, str]:
    """Names of the embedding and of the head that a checkpoint would have untied."""
    untied = copy.copy(config)
    untied.share_embeddings_and_output_weights = False
    embedding, head = vocabulary_tables(family.key_table(untied))
    return embedding, head
