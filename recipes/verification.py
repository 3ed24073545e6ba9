"""``verify``: a table of differences between two checkpoints, and an exit code."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from nemo_dllm.connectors.config_table import dtype_name
from nemo_dllm.connectors.verify import Difference, Verification, verify_checkpoint

# Of the names of tensors that one side lacks.
_MAX_LISTED = 20


def verify_and_print(hf_path: str | Path, checkpoint: str | Path, tolerance: float) -> None:
    """Compare two checkpoints and print what :func:`verify_checkpoint` found.

    Raises:
        SystemExit: with code 1 where they differ by more than the tolerance.
    """
    found = verify_checkpoint(hf_path, checkpoint, tolerance=tolerance)
    console = Console()
    console.print(verification_table(found, hf_path, checkpoint))
    for name in found.unmatched[:_MAX_LISTED]:
        console.print(f"unmatched: {name}", highlight=False)
    for difference in found.facts:
        console.print(f"said differently: {difference}", highlight=False)
    if not found.passed:
        console.print(f"[bold red]FAILED[/]: {_reason(found)}", highlight=False)
        raise SystemExit(1)
    console.print("[bold green]passed[/]")


def verification_table(found: Verification, hf_path: str | Path, checkpoint: str | Path) -> Table:
    """One line for all weights, the worst tensor named, and one for each prompt."""
    table = Table(
        title=f"{hf_path} and {checkpoint}",
        caption=f"family {found.family}, {found.attention} attention; reference: {found.reference}; "
        f"weights in {dtype_name(found.dtype)}, logits in float32",
    )
    for column in ("what", "max error", "cosine", "worst"):
        table.add_column(column, justify="right" if column in ("max error", "cosine") else "left")
    if found.weights:
        worst = _worst(found.weights)
        cosine = min(difference.cosine for difference in found.weights)
        table.add_row(f"{len(found.weights)} tensors", f"{worst.max_error:.2e}", f"{cosine:.8f}", worst.name)
    for difference in found.logits:
        table.add_row(f"logits, {difference.name}", f"{difference.max_error:.2e}", f"{difference.cosine:.8f}", "")
    return table


def _worst(differences: list[Difference]) -> Difference:
    """NaN is worse than anything."""
    return max(differences, key=lambda difference: (difference.max_error != difference.max_error, difference.max_error))


def _reason(found: Verification) -> str:
    if found.unmatched:
        return f"{len(found.unmatched)} tensors are on one side only"
    worst = _worst([*found.weights, *found.logits])
    if found.facts and worst.max_error <= found.tolerance:
        return ", ".join(found.facts)
    return f"{worst.name} differs by {worst.max_error:.2e}, more than the tolerance of {found.tolerance:g}"
