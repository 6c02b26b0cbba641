"""Find files that several ranks of a script opened for writing: each loses what another has written, or repeats it.

hpcdl's own saving and Keras's callbacks write on one rank. What a script opens itself is noted here, and compared when
the script is over.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.core.units import listed

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator

_MOST_FILES = 1000
"""Files to note on a rank."""
_LOG = ".log"
"""Files to which ranks may append without a warning: nobody counts their lines."""
inside = threading.local()
"""`saving`: this thread is inside a write by one rank for all."""
OPENS = "hpcdl.open"
"""Event with the arguments of Python's own for `open`, of what writes without that."""
_NO_FOLDER = -1
"""What Python notes of a rename without descriptors of folders, which hpcdl's own saving for all ranks has."""
_WROTE = "wrote {}: what one wrote may be lost"
_APPENDED = "appended to {}: it has what each wrote"
_NUMBERED = re.compile(r"-\d+\.index$")
"""The end of the files that tf.train.Checkpoint numbers, one after the other."""
_REMEDY = "write it on one rank (`if hpcdl.rank() == 0:`), or with the rank in its name"


@contextlib.contextmanager
def saving_for_all() -> Iterator[None]:
    """Mark that this thread writes a file, or a part of one, that hpcdl lets one rank write for all."""
    inside.saving = True
    try:
        yield
    finally:
        inside.saving = False


class WrittenFiles:
    """The files that this rank's script has opened to write, or renamed something to."""

    def __init__(self) -> None:
        self._written: set[str] = set()
        self._appended: set[str] = set()
        self._removed: set[str] = set()
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
        if not self._on or getattr(inside, "saving", False):
            return
        files = file = None
        if event in ("open", OPENS):
            file, mode, _ = arguments
            known = isinstance(mode, str)
            files = self._written if known and "w" in mode else self._appended if known and "a" in mode else None
            if files is not None and event == "open" and os.path.isdir(file):  # noqa: PTH112  it may be a descriptor
                return  # Python opens the folder in which it makes a temporary file
        elif event == "os.rename" and arguments[3] == _NO_FOLDER:
            # Many scripts write to a temporary name, each rank to one of its own, and rename that.
            files, file = self._written, arguments[1]
        elif event == "shutil.rmtree":
            files, file = self._removed, arguments[0]
        if files is not None and len(files) < _MOST_FILES and isinstance(file, str | os.PathLike):
            files.add(str(Path(os.fsdecode(file)).absolute()))  # the script may change its folder

    @property
    def number(self) -> int:
        """How many files were noted."""
        return len(self._written) + len(self._appended)

    def warnings(self, communicator: Communicator, run_dir: Path) -> list[str]:
        """Return the warnings that files of several ranks deserve. Collective."""
        appended = {path for path in self._appended - self._written if Path(path).suffix != _LOG}
        kept = [_kept(self._written, run_dir), _kept(appended, run_dir)]
        again = [path for path in sorted(self._removed) if Path(path).is_dir()]
        lost = [path for path in sorted(self._written | self._appended) if not Path(path).exists()]
        rows = communicator.allgather_json([*kept, again, lost])
        written_by, appended_by, again_by, lost_by = zip(*rows, strict=True)
        texts = (_of_several(written_by, _WROTE), _of_several(appended_by, _APPENDED), _of_removed(again_by, lost_by))
        return [text for text in texts if text]


def of_unequal_saves(number_by_path: Mapping[str, int], communicator: Communicator) -> str:
    """Return the warning if two ranks have saved to one path, but not as often, or nothing. Collective."""
    counts = Counter[str]()
    for path, number in itertools.islice(number_by_path.items(), _MOST_FILES):
        counts[_NUMBERED.sub("", path)] += number
    first, *others = communicator.allgather_json(counts)
    for rank, other in enumerate(others, 1):
        for path, number in first.items():
            if other.get(path, number) != number:
                return (
                    f"rank 0 saved {os.path.relpath(path)} {number} times and rank {rank} {other[path]} times, as if "
                    "each chose the best by a number of its own samples; the last one stays. Choose by "
                    "hpcdl.allreduce(number), or save behind `if hpcdl.rank() == 0`"
                )
    return ""


def _of_several(by_rank: Sequence[Sequence[Any]], what: str) -> str:
    """Return the warning about files that several ranks have in common, or nothing."""
    ranks: dict[tuple[str, int], list[str]] = defaultdict(list)
    for rank, row in enumerate(by_rank):
        for path, number in row:
            ranks[path, number].append(str(rank))
    shared = {path: of for (path, _), of in ranks.items() if len(of) > 1}
    if not shared:
        return ""
    (first, *_), files = shared.values(), [os.path.relpath(path) for path in shared]
    return f"ranks {listed(first, 4)} each {what.format(listed(files, 2))}; {_REMEDY}"


def _of_removed(again_by: Sequence[Sequence[str]], lost_by: Sequence[Sequence[str]]) -> str:
    """Return the warning if a rank has removed, and made again, a folder in which another has lost a file."""
    for rank, folders in enumerate(again_by):
        for other, files in enumerate(lost_by):
            for folder in folders:
                names = [Path(file).name for file in files if Path(file).is_relative_to(folder)]
                if names and rank != other:
                    return (
                        f"rank {rank} removed {os.path.relpath(folder)}, where rank {other} had written "
                        f"{listed(names, 2)}: prepare folders on rank 0 alone, and call hpcdl.barrier() after it"
                    )
    return ""


def _kept(paths: set[str], run_dir: Path) -> list[list[Any]]:
    """Return path and inode of files and folders that still exist: not those of caches and of the run."""
    groups: list[list[Any]] = []
    for path in map(Path, sorted(paths)):
        hidden = any(part.startswith(".") or part in ("cache", "__pycache__") for part in path.parts)
        # With the inode: nodes may have a file of this path on storage of their own.
        if not hidden and not path.is_relative_to(run_dir) and (path.is_file() or path.is_dir()):
            groups.append([str(path), path.stat().st_ino])
    return groups
