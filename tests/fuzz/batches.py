"""Runs many mutations in one child process with little memory, and tells those that did not end as they should."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import HpcdlError
from tests.fuzz.kinds import KINDS, Kind
from tests.fuzz.mutations import SPECIAL, mutated

MOST_BYTES = 1 << 30
MOST_S = 20
EXIT_CODES = (1, 2, 3)
LONGEST_LINE = 2000
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""Thousands of small files are made and synced; a disk would take its time."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A mutation that ended in anything but success or one line: `case` is its number, or a special file's name."""

    kind: str
    case: int | str
    problem: str
    content: str

    def __str__(self) -> str:
        return f"python -m tests.fuzz {self.kind!r} {str(self.case)!r}: {self.problem}\n  {self.content}"


def failures(name: str, cases: Sequence[int | str]) -> list[Failure]:
    """The failures of the kind `name`; a child that dies is one, and another child goes on behind it."""
    found, waiting = [], list(cases)
    with tempfile.TemporaryDirectory(prefix="hpcdl-fuzz-", dir=MEMORY) as folder:
        while waiting:
            done = 0
            for done, problem in enumerate(_of_child(name, waiting, Path(folder)), 1):
                if problem:
                    found.append(Failure(kind=name, case=waiting[done - 1], problem=problem[0], content=problem[1]))
            waiting = waiting[done:]
    return found


def _of_child(name: str, cases: list[int | str], folder: Path) -> Iterator[tuple[str, str] | None]:
    """What came of each case in turn; after one that the child died of there are no more."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _child(name, cases, folder, writing)
    os.close(writing)
    told = 0
    try:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while select.select([pipe], [], [], 3 * MOST_S)[0] and (line := pipe.readline()):
                told += 1
                yield json.loads(line)
    finally:
        if told < len(cases):
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if told < len(cases):
        how = f"exit code {status >> 8}" if status >> 8 else f"signal {status & 127}; 9 is for one that hung"
        yield f"the process died ({how})", _shown(_content(KINDS[name], name, cases[told], folder / "again"))


def _child(name: str, cases: list[int | str], folder: Path, writing: int) -> None:
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(nowhere, descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        signal.signal(signal.SIGALRM, _too_long)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
        for case in cases:
            problem = problem_of(KINDS[name], name, case, Path(tempfile.mkdtemp(dir=folder)))
            os.write(writing, (json.dumps(problem) + "\n").encode())
        assert "tensorflow" not in sys.modules
        os._exit(0)
    finally:
        os._exit(99)


def problem_of(kind: Kind, name: str, case: int | str, folder: Path, *, raises: bool = False) -> tuple[str, str] | None:
    """What is wrong with how the reading of one mutation ended, and its bytes; None where it ended well."""
    path = _copied(kind, folder)
    original = path.read_bytes()
    _remove(path)
    content = _mutation(kind, name, case, original)
    if content is None:
        SPECIAL[str(case)](path)
    else:
        path.write_bytes(content)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    problem = ""
    try:
        kind.read(path)
    except HpcdlError as error:
        problem = _bad_message(error)
        if raises:
            print(f"exit {error.exit_code}: {error}"[:2000])
    except (Exception, _TooLong) as error:  # whatever it is, it is reported
        signal.setitimer(signal.ITIMER_REAL, 0)
        if raises:
            raise
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/hpcdl/" in frame.filename]
        where = f" in {frames[-1].filename.partition('/hpcdl/')[2]}:{frames[-1].lineno}" if frames else ""
        problem = f"{type(error).__name__}{where}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not raises:
        shutil.rmtree(folder, ignore_errors=True)
    return (problem, _shown(content)) if problem else None


def _mutation(kind: Kind, name: str, case: int | str, original: bytes) -> bytes | None:
    if isinstance(case, str):
        return None
    inner = kind.opened(original)
    return kind.sealed(mutated(inner, kind.mutations, random.Random(f"{name} {case}")))


def _content(kind: Kind, name: str, case: int | str, folder: Path) -> bytes | None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return _mutation(kind, name, case, _copied(kind, folder).read_bytes())


def _copied(kind: Kind, folder: Path) -> Path:
    """The file to damage in a copy of the valid example, which is made once and lies beside `folder`."""
    example = folder.parent / "example"
    if not example.exists():
        example.mkdir()
        (folder.parent / "damaged").write_text(str(kind.make(example).relative_to(example)))
    shutil.copytree(example, folder, dirs_exist_ok=True)
    return folder / (folder.parent / "damaged").read_text()


def _shown(content: bytes | None) -> str:
    return "" if content is None else f"{content[:1500]!r} of {len(content)} bytes"


def _bad_message(error: HpcdlError) -> str:
    if error.exit_code not in EXIT_CODES:
        return f"exit code {error.exit_code}: {error}"
    if any(not line.strip() or len(line) > LONGEST_LINE for line in str(error).split("\n")):
        return f"{type(error).__name__} is no message of short lines: {str(error)[:300]!r}"
    return ""


def _remove(path: Path) -> None:
    with contextlib.suppress(IsADirectoryError):
        path.unlink()


class _TooLong(BaseException):
    """The time is over; nothing that reads files may catch this."""


def _too_long(number: int, frame: object) -> None:
    raise _TooLong(f"it took more than {MOST_S} s")


def main(arguments: list[str]) -> int:
    """One case with its traceback, the file left where it says; or so many cases of all kinds, or of one."""
    if len(arguments) == 2 and not arguments[1].startswith("x"):
        signal.signal(signal.SIGALRM, _too_long)
        folder = Path(tempfile.mkdtemp(prefix="hpcdl-fuzz-")) / "case"
        folder.mkdir()
        print(folder)
        case = arguments[1] if arguments[1] in SPECIAL else int(arguments[1])
        print(problem_of(KINDS[arguments[0]], arguments[0], case, folder, raises=True) or "well")
        return 0
    names = [arguments[0]] if len(arguments) == 2 else list(KINDS)
    count = int(arguments[-1].removeprefix("x"))
    bad = 0
    for name in names:
        found = failures(name, [*SPECIAL, *range(count)])
        bad += len(found)
        print(f"{name}: {len(found)} of {count + len(SPECIAL)}", *found[:12], sep="\n  ", flush=True)
    return min(bad, 1)
