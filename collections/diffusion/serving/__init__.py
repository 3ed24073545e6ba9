"""An OpenAI-compatible server for diffusion language models: dynamic batches, streams, and the canvas to watch."""

from nemo_dllm.collections.diffusion.serving.app import create_app
from nemo_dllm.collections.diffusion.serving.engine import BatchingEngine
from nemo_dllm.collections.diffusion.serving.limits import ServerLimits
from nemo_dllm.collections.diffusion.serving.rows import Row, RowUpdate
from nemo_dllm.collections.diffusion.serving.served_model import ServedModel, TextModel
from nemo_dllm.collections.diffusion.serving.server import serve

__all__ = ["BatchingEngine", "Row", "RowUpdate", "ServedModel", "ServerLimits", "TextModel", "create_app", "serve"]
