"""Which commit of a repository a checkpoint folder is."""

from pathlib import Path


def revision_of(folder: Path) -> str | None:
    """The commit of a folder that is a snapshot in the Hugging Face cache, or a git checkout; else None."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots":
        return folder.name
    head = folder / ".git" / "HEAD"
    if not head.is_file():
        return None
    content = head.read_text().strip()
    if not content.startswith("ref: "):
        return content
    name = content.removeprefix("ref: ")
    ref = folder / ".git" / name
    if ref.is_file():
        return ref.read_text().strip()
    packed = folder / ".git" / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else ()
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
