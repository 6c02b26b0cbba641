"""Find files that several ranks of a script opened for writing: each loses what another has written.

hpcdl's own saving and Keras's callbacks write on one rank. What a script opens itself is noted here, and compared when
the script is over.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.core.units import listed

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator

_MOST_FILES = 1000
"""Files to note on a rank."""


class WrittenFiles:
    """The files that this rank's script has opened to write."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self._on = False

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note files that are opened inside this context by `open`, which numpy, pandas and matplotlib also call."""
        # A hook cannot be removed. A function in place of `open` would be in the tracebacks of the script's errors.
        sys.addaudithook(self._note)
        self._on = True
        try:
            yield
        finally:
            self._on = False

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not self._on or len(self._paths) >= _MOST_FILES:
            return
        file, mode, _ = arguments
        if isinstance(file, str) and isinstance(mode, str) and "w" in mode:
            self._paths.add(str(Path(file).absolute()))  # the script may change its folder

    def warning(self, communicator: Communicator, run_dir: Path) -> str:
        """Return the warning that files of several ranks deserve, or nothing. Collective."""
        by_rank = communicator.allgather_json(_kept(self._paths, run_dir))
        ranks: dict[tuple[str, int], list[str]] = defaultdict(list)
        for rank, row in enumerate(by_rank):
            for path, number in row:
                ranks[path, number].append(str(rank))
        shared = {path: of for (path, _), of in ranks.items() if len(of) > 1}
        if not shared:
            return ""
        (first, *_), files = shared.values(), [os.path.relpath(path) for path in shared]
        return (
            f"ranks {listed(first, 4)} each wrote {listed(files, 2)}: what one wrote may be lost; write it on one "
            "rank (`if hpcdl.rank() == 0:`), or with the rank in its name"
        )


def _kept(paths: set[str], run_dir: Path) -> list[list[Any]]:
    """Return path and inode of regular files that still exist: not those of caches and of the run."""
    groups: list[list[Any]] = []
    for path in map(Path, sorted(paths)):
        hidden = any(part.startswith(".") or part in ("cache", "__pycache__") for part in path.parts)
        # With the inode: nodes may have a file of this path on storage of their own.
        if not hidden and not path.is_relative_to(run_dir) and path.is_file():
            groups.append([str(path), path.stat().st_ino])
    return groups
