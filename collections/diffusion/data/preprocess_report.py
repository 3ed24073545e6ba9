"""What preprocessing tells: a line while it works, and what it did."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from nemo_dllm.collections.diffusion.data.bad_rows import BadRow, describe_bad_rows
from nemo_dllm.collections.diffusion.data.encoded_part import PartReport
from nemo_dllm.collections.diffusion.data.sources import Source, repeated_sources


@dataclass(frozen=True)
class PreprocessReport:
    """What became of a corpus.

    documents, tokens: written, begin and end tokens included.
    characters: of the documents written.
    empty: documents without a character; left out, and not counted as bad.
    empty_files: inputs of size 0.
    repeated_files: inputs that are read again, because they were named more than once.
    bad_rows: left out, in the order of the corpus.
    seconds: of this run, which may have found parts of an earlier one.
    """

    documents: int
    tokens: int
    characters: int
    empty: int
    empty_files: list[str]
    repeated_files: list[str]
    bad_rows: list[BadRow]
    seconds: float

    @classmethod
    def of(cls, sources: Sequence[Source], parts: Sequence[PartReport], seconds: float) -> "PreprocessReport":
        """Add up the parts."""
        return cls(
            documents=sum(part.documents for part in parts),
            tokens=sum(part.tokens for part in parts),
            characters=sum(part.characters for part in parts),
            empty=sum(part.empty for part in parts),
            empty_files=[source.name for source in sources if source.size == 0],
            repeated_files=repeated_sources(sources),
            bad_rows=[row for part in parts for row in part.bad_rows],
            seconds=seconds,
        )

    def summary(self) -> str:
        """A few lines for a person: counts, and an example of each kind of bad row."""
        lines = [f"{self.documents:,} documents, {self.tokens:,} tokens, {self.seconds:.1f} s"]
        if self.empty_files:
            lines.append(f"{len(self.empty_files)} empty files, the first: {self.empty_files[0]}")
        if self.repeated_files:
            first = self.repeated_files[0]
            lines.append(f"{len(self.repeated_files)} files are in it more than once, the first: {first}")
        if self.empty:
            lines.append(f"{self.empty:,} empty documents left out")
        if self.bad_rows:
            files = len({row.source for row in self.bad_rows})
            lines.append(f"{len(self.bad_rows):,} bad rows left out, in {files} files:")
            lines.append(describe_bad_rows(self.bad_rows))
        return "\n".join(lines)

    def to_json(self) -> str:
        """All fields; bad rows as [source, row, reason]."""
        return json.dumps(asdict(self), indent=1)


class ProgressLine:
    """A progress bar with rate and remaining time; nothing unless shown.

    Args:
        total: bytes of all inputs.
        shown: None shows it on a terminal only.
        stream: where to write.
    """

    def __init__(self, total: int, shown: bool | None, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
        shown = stream.isatty() if shown is None else shown
        self._progress = Progress(*columns, console=Console(file=stream), disable=not shown)
        self._task = self._progress.add_task("", total=total, rate="")
        self._start = time.perf_counter()
        self._tokens = 0

    def __enter__(self) -> "ProgressLine":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def advance(self, size: int, tokens: int) -> None:
        """Count a part: bytes of input, tokens of output."""
        self._tokens += tokens
        rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        self._progress.update(self._task, advance=size, rate=f"{rate:,.0f} tokens/s")
