"""Run many mutations in one child process with little memory, and report those that did not end as they should.

A reading ends well with 0, or with one line and an exit code that says whose file is at fault; existing files stay as
they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import resource
import select
import shutil
import signal
import stat
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from hpcdl.core.errors import HpcdlError
from hpcdl.data.sources.base.source import UnreadableSample
from tests.conftest import patience
from tests.fuzz.kinds import KINDS, Kind
from tests.fuzz.mutations import SPECIAL, mutated

MOST_BYTES = 1 << 30
MOST_S = 20
LONGEST_LINE = 2000
DIED = -1
"""Stands for the exit code of a child that died."""
AS_IT_IS = "as it is"
"""The case of the unchanged example."""
OWN = "of my own.txt"
"""A file beside it that does not belong to hpcdl."""
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.fuzz.batches"])
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Thousands of small files are written and synced, which would be slow on a disk."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A mutation that did not end in success or one line: `case` is its number, or a special file's name."""

    kind: str
    case: int | str
    problem: str
    content: str

    def __str__(self) -> str:
        return f"python -m tests.fuzz {self.kind!r} {str(self.case)!r}: {self.problem}\n  {self.content}"


@dataclass(kw_only=True)
class Outcome:
    """How often a kind's cases ended with each exit code, and the cases that did not end as they should."""

    codes: Counter[int] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def failures(name: str, cases: Sequence[int | str]) -> list[Failure]:
    """Return the failures of the kind `name`."""
    return outcome(name, cases).failures


def outcome(name: str, cases: Sequence[int | str]) -> Outcome:
    """Return the outcome of all cases; if a child dies, this is a failure, and another child continues after it."""
    found, waiting = Outcome(), list(cases)
    with tempfile.TemporaryDirectory(prefix="hpcdl-fuzz-", dir=MEMORY) as folder:
        while waiting:
            done = 0
            for done, (code, problem, content) in enumerate(_of_child(name, waiting, Path(folder)), 1):
                found.codes[code] += 1
                if problem:
                    failure = Failure(kind=name, case=waiting[done - 1], problem=problem, content=content)
                    found.failures.append(failure)
            waiting = waiting[done:]
    return found


def _of_child(name: str, cases: list[int | str], folder: Path) -> Iterator[tuple[int, str, str]]:
    """Yield exit code, problem and content of each case in turn; if the child dies, its case is the last.

    A process without threads forks the child: a fork of one with TensorFlow's threads would keep their locks for ever.
    """
    reading, writing = SERVER.Pipe(duplex=False)
    child = SERVER.Process(target=_child, args=(name, cases, folder, writing), daemon=True)
    child.start()
    writing.close()
    reported = 0
    try:
        with reading, os.fdopen(os.dup(reading.fileno()), "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], patience(6 * MOST_S))[0] and (line := pipe.readline()):
                reported += 1
                yield json.loads(line)
    finally:
        if reported < len(cases):
            child.kill()
        child.join()
    if reported < len(cases):
        status = child.exitcode or 0
        how = f"exit code {status}" if status >= 0 else f"signal {-status}; 9 is for one that hung"
        made = (folder / "damaged").exists()
        shown = _shown(_content(KINDS[name], name, cases[reported], folder / "again") if made else None)
        yield DIED, f"the process died ({how})", shown


def _child(name: str, cases: list[int | str], folder: Path, writing: Connection) -> None:
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nowhere, descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGALRM, _too_long)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if KINDS[name].needs_keras:
            importlib.import_module("hpcdl.rank.outputs")
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
        for case in cases:
            problem = problem_of(KINDS[name], name, case, Path(tempfile.mkdtemp(dir=folder)))
            os.write(writing.fileno(), (json.dumps(problem) + "\n").encode())
        assert KINDS[name].needs_keras or "tensorflow" not in sys.modules
        os._exit(0)
    finally:
        os._exit(99)


def problem_of(kind: Kind, name: str, case: int | str, folder: Path, *, raises: bool = False) -> tuple[int, str, str]:
    """Read one mutation; return the exit code, what is wrong with it, and the bytes."""
    path = _copied(kind, folder)
    original = path.read_bytes()
    _remove(path)
    content = _mutation(kind, name, case, original)
    if content is None:
        SPECIAL[str(case)](path)
    else:
        path.write_bytes(content)
    (folder / OWN).write_text("of the user's own\n")
    before = _files_below(folder)
    signal.setitimer(signal.ITIMER_REAL, patience(MOST_S))
    code, problem = 0, ""
    try:
        kind.read(path)
    except HpcdlError as error:
        code, problem = error.exit_code, _bad_message(error, kind)
        if raises:
            print(f"exit {error.exit_code}: {error}"[:2000])
    except (Exception, _TooLong) as error:  # report any exception
        signal.setitimer(signal.ITIMER_REAL, 0)
        if raises:
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/hpcdl/" in frame.filename]
        where = f" in {frames[-1].filename.partition('/hpcdl/')[2]}:{frames[-1].lineno}" if frames else ""
        code, problem = 1, f"{type(error).__name__}{where}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    changed = sorted(set(before.items()) - set(_files_below(folder).items()))
    if kind.continues:
        changed = [(name, reported) for name, reported in changed if folder / name != path]
    if changed and not problem:
        problem = f"{', '.join(name for name, _ in changed)[:300]} changed or gone"
    if not raises:
        shutil.rmtree(folder, ignore_errors=True)
    return code, problem, _shown(content) if problem else ""


def _files_below(folder: Path) -> dict[str, str]:
    """Return every path below a folder, with its kind and content."""
    found = {}
    for path in folder.rglob("*"):
        reported = path.lstat()
        plain = stat.S_ISREG(reported.st_mode) and reported.st_size < MOST_BYTES
        digest = hashlib.blake2b(path.read_bytes()).hexdigest() if plain else ""
        found[str(path.relative_to(folder))] = f"{reported.st_mode:o} {reported.st_size if plain else ''} {digest}"
    return found


def _mutation(kind: Kind, name: str, case: int | str, original: bytes) -> bytes | None:
    if case == AS_IT_IS:
        return original
    if isinstance(case, str):
        return None
    inner = kind.opened(original)
    return kind.sealed(mutated(inner, kind.mutations, random.Random(f"{name} {case}")))


def _content(kind: Kind, name: str, case: int | str, folder: Path) -> bytes | None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return _mutation(kind, name, case, _copied(kind, folder).read_bytes())


def _copied(kind: Kind, folder: Path) -> Path:
    """Return the file to damage, in a copy of the valid example, which is made once beside `folder`."""
    example = folder.parent / "example"
    if not example.exists():
        example.mkdir()
        (folder.parent / "damaged").write_text(str(kind.make(example).relative_to(example)))
    shutil.copytree(example, folder, dirs_exist_ok=True)
    return folder / (folder.parent / "damaged").read_text()


def _shown(content: bytes | None) -> str:
    return "" if content is None else f"{content[:1500]!r} of {len(content)} bytes"


def _bad_message(error: HpcdlError, kind: Kind) -> str:
    while_working = (1,) if isinstance(error, UnreadableSample) else ()  # a bad sample is found at its turn
    if error.exit_code not in (*kind.codes, *while_working):
        return f"exit code {error.exit_code}: {error}"
    if any(not line.strip() or len(line) > LONGEST_LINE for line in str(error).split("\n")):
        return f"{type(error).__name__} is not a message of short lines: {str(error)[:300]!r}"
    return ""


def _remove(path: Path) -> None:
    with contextlib.suppress(IsADirectoryError):
        path.unlink()


class _TooLong(BaseException):
    """The time limit has passed; code that reads files must not catch this."""


def _too_long(number: int, frame: object) -> None:
    raise _TooLong(f"it took more than {MOST_S} s")


def main(arguments: list[str]) -> int:
    """Run one case with its traceback and keep its file at the printed path, or run N cases of all kinds or of one."""
    if len(arguments) == 2 and not arguments[1].startswith("x"):
        signal.signal(signal.SIGALRM, _too_long)
        folder = Path(tempfile.mkdtemp(prefix="hpcdl-fuzz-")) / "case"
        folder.mkdir()
        print(folder)
        case = arguments[1] if arguments[1] in SPECIAL else int(arguments[1])
        print(problem_of(KINDS[arguments[0]], arguments[0], case, folder, raises=True)[1] or "well")
        return 0
    names = [arguments[0]] if len(arguments) == 2 else list(KINDS)
    count = int(arguments[-1].removeprefix("x"))
    bad = 0
    for name in names:
        found = failures(name, [*SPECIAL, *range(count)])
        bad += len(found)
        print(f"{name}: {len(found)} of {count + len(SPECIAL)}", *found[:12], sep="\n  ", flush=True)
    return min(bad, 1)
