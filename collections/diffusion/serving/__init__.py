"""An OpenAI-compatible server for diffusion language models: dynamic batches, streams, and the canvas to watch.

What batches rows needs no package of the extra ``serve``; ``create_app`` and ``serve`` are imported when they are asked
for, and need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.rows import Row, RowUpdate
from nemo_dllm.collections.diffusion.serving.served_model import ServedModel, TextModel

if TYPE_CHECKING:
    from nemo_dllm.collections.diffusion.serving.app import create_app
    from nemo_dllm.collections.diffusion.serving.server import serve

__all__ = ["BatchingEngine", "Row", "RowUpdate", "ServedModel", "ServerLimits", "TextModel", "create_app", "serve"]

_MODULES = {"create_app": "app", "serve": "server"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
