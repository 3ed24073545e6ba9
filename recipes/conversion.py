"""Import, export and verification on the command line: models for ``nemo llm import``, and our own commands."""

import lightning.pytorch as pl
import nemo_run as run

from nemo_dllm.collections.diffusion.inference import locate_checkpoint
from nemo_dllm.connectors.conversion import diffusion_model, import_checkpoint
from nemo_dllm.connectors.engines import export_for_engine
from nemo_dllm.connectors.hf_export import export_hf_checkpoint
from nemo_dllm.recipes.entrypoints import dllm_command
from nemo_dllm.recipes.verification import verify_and_print


@run.cli.factory(name="a2d")
def a2d(path: str, mask_token_id: int | None = None, right_shift: bool | None = None) -> run.Config[pl.LightningModule]:
    """The model of an autoregressive checkpoint folder, to be trained on as a diffusion model.

    Examples:
        ``nemo llm import model="a2d('Qwen3-0.6B')" source=hf://Qwen3-0.6B output_path=imported --yes``
    """
    return run.Config(diffusion_model, path, "a2d", mask_token_id=mask_token_id, right_shift=right_shift)


@run.cli.factory(name="mdlm")
def mdlm(path: str, mask_token_id: int | None = None) -> run.Config[pl.LightningModule]:
    """The model of a masked diffusion checkpoint folder."""
    return run.Config(diffusion_model, path, "mdlm", mask_token_id=mask_token_id)


@run.cli.factory(name="bd3lm")
def bd3lm(path: str, mask_token_id: int | None = None, block_size: int | None = None) -> run.Config[pl.LightningModule]:
    """The model of a checkpoint folder, to be trained on as a block diffusion model."""
    return run.Config(diffusion_model, path, "bd3lm", mask_token_id=mask_token_id, block_size=block_size)


@dllm_command(
    name="import",
    help="Hugging Face folder to NeMo checkpoint: source=FOLDER output_path=FOLDER",
)
def import_hf(
    source: str,
    output_path: str,
    kind: str | None = None,
    mask_token_id: int | None = None,
    mask_init: str = "mean",
    overwrite: bool = False,
) -> None:
    """Write a Hugging Face checkpoint as a NeMo checkpoint.

    Args:
        source, output_path, kind, mask_token_id, mask_init, overwrite: see :func:`import_checkpoint`.
    """
    options = {"kind": kind, "mask_token_id": mask_token_id, "mask_init": mask_init, "overwrite": overwrite}
    print(f"imported: {import_checkpoint(source, output_path, **options)}")


@dllm_command(
    name="export",
    help="run or NeMo checkpoint to Hugging Face folder: path=CHECKPOINT output_path=FOLDER; "
    "--for sglang or lmdeploy: what that engine loads, from either",
)
def export_hf(path: str, output_path: str, overwrite: bool = False, engine: str | None = None) -> None:
    """Write a NeMo checkpoint of a diffusion model as a Hugging Face checkpoint.

    Args:
        path: of the checkpoint, or of a run, whose latest one it then is.
        output_path, overwrite: see :func:`export_hf_checkpoint`.
        engine: that is to serve it, see :func:`export_for_engine`; the command line calls it ``--for`` too.
    """
    path = locate_checkpoint(path).path
    if engine is None:
        print(f"exported: {export_hf_checkpoint(path, output_path, overwrite=overwrite)}")
        return
    exported = export_for_engine(path, output_path, engine, overwrite=overwrite)
    print(f"exported: {exported.path}")
    for note in exported.notes:
        print(f"note: {note}")
    print(f"serve it: {exported.command}")


@dllm_command(help="Compare a conversion: hf_path=FOLDER checkpoint=CHECKPOINT")
def verify(hf_path: str, checkpoint: str, tolerance: float = 1e-3) -> None:
    """Compare weights and logits of a checkpoint with a Hugging Face checkpoint; exit code 1 where they differ.

    Args:
        hf_path, tolerance: see :func:`verify_checkpoint`.
        checkpoint: as well, or a run, whose latest one it then is.
    """
    verify_and_print(hf_path, locate_checkpoint(checkpoint).path, tolerance)
