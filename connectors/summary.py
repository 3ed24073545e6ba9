"""What a conversion did, as a JSON file beside its result."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from nemo_dllm.connectors.config_table import dtype_name
from nemo_dllm.connectors.families.registry import family_of
from nemo_dllm.connectors.vocabulary_growth import vocabulary_tables


class TensorTally:
    """Counts and checks the tensors that pass through, one by one.

    The checksum is that of all names, dtypes, shapes and values; order and shards do not matter.

    Args:
        config: NeMo's configuration of the model.
    """

    def __init__(self, config):
        table = family_of(config).key_table(config)
        # Without the head of a file that holds a tied one too.
        self._parameters = {name for entry in table.entries() for name in entry.hf}
        self._vocabulary = set(vocabulary_tables(table))
        self._of_expert = {name for entry in table.entries() if entry.of_expert for name in entry.hf}
        # Of an expert's parameters, the share that a token uses.
        self._active_share = config.moe_router_topk / config.num_moe_experts if config.num_moe_experts else 1
        self._digests: dict[str, str] = {}
        self._counts = {"total": 0, "embedding": 0, "of_experts": 0}
        self._dtypes: dict[torch.dtype, int] = {}

    def watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same (name, tensor) pairs, on the CPU."""
        for name, tensor in tensors:
            self._digests[name] = tensor_digest(name, tensor)
            parameters = tensor.numel() * (name in self._parameters)
            self._counts["total"] += parameters
            self._counts["embedding"] += parameters * (name in self._vocabulary)
            self._counts["of_experts"] += parameters * (name in self._of_expert)
            self._dtypes[tensor.dtype] = self._dtypes.get(tensor.dtype, 0) + parameters
            yield name, tensor

    def to_json(self) -> dict[str, Any]:
        """Parameter counts, dtype and checksum of what has passed."""
        total, embedding, of_experts = (self._counts[name] for name in ("total", "embedding", "of_experts"))
        return {
            "parameters": {
                "total": total,
                "embedding": embedding,
                "non_embedding": total - embedding,
                "active": total - round(of_experts * (1 - self._active_share)),
            },
            "dtype": dtype_name(max(self._dtypes, key=self._dtypes.__getitem__)),
            "checksum": combined_digest(self._digests),
        }


def tensor_digest(name: str, tensor: Tensor) -> str:
    """SHA-256 of a tensor's name, dtype, shape and values; the tensor is on the CPU."""
    digest = hashlib.sha256(f"{name} {dtype_name(tensor.dtype)} {list(tensor.shape)}\n".encode())
    digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def combined_digest(digests: dict[str, str]) -> str:
    """Checksum of a checkpoint, from :func:`tensor_digest` of each of its tensors by name."""
    lines = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    return f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"


def conversion_summary(direction: str, tally: TensorTally, **told: Any) -> bytes:
    """Content of the summary file.

    Args:
        direction: ``import`` or ``export``.
        tally: of the tensors in the result, under their Hugging Face names.
        told: further fields.
    """
    content = {"direction": direction, **told, **tally.to_json(), "nemo_dllm": version("nemo-dllm")}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
