"""NeMo's own import and export for diffusion models. Importing this file registers them.

``llm.import_ckpt(model, source="hf://PATH", output_path=...)`` and ``llm.export_ckpt(path, target="hf",
output_path=...)`` then know every class in ``MODEL_CLASSES``.
"""

from pathlib import Path

from nemo.lightning import io

from nemo_dllm.collections.diffusion.models.a2d import A2DModel
from nemo_dllm.collections.diffusion.models.bd3lm import BD3LMModel
from nemo_dllm.collections.diffusion.models.mdlm import MDLMModel
from nemo_dllm.collections.diffusion.models.model import DiffusionModel
from nemo_dllm.connectors.adoption import adopt_import
from nemo_dllm.connectors.companions import CHAT_TEMPLATES
from nemo_dllm.connectors.hf_export import export_hf_checkpoint
from nemo_dllm.connectors.hf_import import import_hf_checkpoint

MODEL_CLASSES = (MDLMModel, BD3LMModel, A2DModel)


class HFImporter(io.ModelConnector):
    """Reads a Hugging Face checkpoint of any known family; the path is a folder, or a name on the Hugging Face Hub.

    NeMo calls the importer before it shows it the model, whose class and objective the checkpoint takes. So the call
    notes where to write, and :meth:`on_import_ckpt`, which follows at once, does the work.
    """

    def __call__(self, output_path: Path | None = None, overwrite: bool = False, mask_init: str = "mean") -> Path:
        """Note where to write; returns that path (NeMo's model cache where None).

        ``mask_init``: see :func:`import_hf_checkpoint`.
        """
        self._output_path = Path(output_path or self.local_path())
        self._overwrite, self._mask_init = overwrite, mask_init
        return self._output_path

    def on_import_ckpt(self, model: DiffusionModel) -> None:
        """Import, unless that was done before or by another process meanwhile, and give ``model`` the tokenizer and the
        mask token.
        """
        if self._output_path.exists() and not self._overwrite:
            adopt_import(model, self._output_path)
            return
        options = {"overwrite": self._overwrite, "mask_init": self._mask_init}
        try:
            import_hf_checkpoint(model, local_folder(Path(self)), self._output_path, **options)
        except FileExistsError:
            if not self._output_path.exists():  # A link that leads nowhere has the name.
                raise
            adopt_import(model, self._output_path)


class HFExporter(io.ModelConnector):
    """Writes the NeMo checkpoint at its path as a Hugging Face checkpoint folder."""

    def __call__(self, output_path: Path, overwrite: bool = False, max_shard_size: int | str | None = None) -> Path:
        """See :func:`export_hf_checkpoint`."""
        return export_hf_checkpoint(Path(self), output_path, max_shard_size=max_shard_size, overwrite=overwrite)

    def nemo_load(self, path: Path, trainer=None, cpu: bool = True):
        """Always a ``RuntimeError``: NeMo loads a checkpoint whole to learn whether ModelOpt quantised it, and
        takes this for a no; the export loads it itself."""
        raise RuntimeError("not a ModelOpt checkpoint")


def local_folder(source: Path) -> Path:
    """A checkpoint's folder as it is; a name on the Hugging Face Hub is fetched.

    Raises:
        FileNotFoundError: where it can be neither.
    """
    if source.is_dir() or source.is_absolute():
        return source
    from huggingface_hub import snapshot_download

    others = ["*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.pth", "*.pt", "*/*"]
    try:
        folder = Path(snapshot_download(str(source), ignore_patterns=[*others, "*.bin"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(str(source), ignore_patterns=others))
        snapshot_download(str(source), allow_patterns=f"{CHAT_TEMPLATES}/*.jinja")
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{source} is neither a folder nor could it be fetched from the Hugging Face Hub "
            f"({' '.join(str(error).split())})"
        ) from error
    return folder


for model_class in MODEL_CLASSES:
    io.model_importer(model_class, "hf")(HFImporter)
    io.model_exporter(model_class, "hf")(HFExporter)
