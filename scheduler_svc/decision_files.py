"""The decision log in a folder that never grows past its bound: eight files, of which the oldest goes first.

Knows lines and files, nothing of decisions. Each file begins with a header that the core can be made anew from, so each
can be replayed alone.
"""

from pathlib import Path
from typing import TextIO

from scheduler_svc.core.decision_log import SUFFIX

FILES = 8  # that share the bound


class DecisionFiles:
    """A core's DecisionLog. Args: max_bytes: of the folder; a file may be longer by its last line."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_file_bytes = max_bytes // FILES
        self._next = 1 + max((int(path.stem) for path in self._files()), default=0)
        self._file: TextIO | None = None
        self._left = 0

    def begin(self, header: str) -> None:
        if self._file is not None:
            self._file.close()
        for path in self._files()[: -(FILES - 1)]:
            path.unlink()
        self._file = (self._folder / f"{self._next:010d}{SUFFIX}").open("w", buffering=1, encoding="ascii")
        self._next += 1
        self._file.write(f"{header}\n")
        self._left = self._max_file_bytes - len(header)

    def write(self, line: str) -> bool:
        """Whether the file is full; at least one line follows each header."""
        assert self._file is not None, "a log begins with a header"
        self._file.write(f"{line}\n")
        self._left -= len(line) + 1
        return self._left <= 0

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.glob(f"*{SUFFIX}") if path.stem.isdigit())
