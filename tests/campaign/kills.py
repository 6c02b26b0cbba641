"""Strike commands at random moments, and check what remains: a user's own files, processes, and the resumed command.

Each try is a fresh folder with a TMPDIR of its own, by which its processes are known, and with files of the user's own
beside and in what the command writes. The struck command is then resumed to its end.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaign.targets import OWN, TARGETS, Place, Target, make_common
from tests.conftest import CommandLine, Finished, end_family, patience, program_of, send
from tests.training_runs import record_of

WAYS = {
    "the command": signal.SIGKILL,
    "one process": signal.SIGKILL,
    "all processes": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
}
"""What is struck, and how: SIGKILL, or a signal that asks the command to stop."""
OFTEN = (4, 4, 4, 3, 1)
ASKED = ("SIGTERM", "SIGINT")
GONE_S, END_S = 10.0, 300.0
WORDS = b"what I wrote myself\n"
_OF_FAILED = re.compile(r"trials/N/(.*/)?(\.hpcdl-lock|rank-N\.place)$")
"""Files that a failed trial may contain."""
MOST_TRIES = 6
"""Attempts to strike a command before it is over."""


@dataclass(kw_only=True)
class Try:
    """The result of one try: `end` is resumed, refused, or empty if neither; `problems` lists what is wrong.

    `lost` lists what was the user's, or was saved, and no longer exists.
    """

    command: str
    number: int
    way: str = ""
    moment: str = ""
    code: int | None = None
    gone_s: float = 0.0
    end: str = ""
    said: str = ""
    lost: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """An undisturbed call: its seconds, and the shapes of what it leaves."""

    seconds: float
    shapes: frozenset[str]


class Owner(threading.Thread):
    """A user who puts a file of their own into each folder of `target` as soon as it exists."""

    def __init__(self, place: Place, target: Target) -> None:
        super().__init__(name="owner", daemon=True)
        self.files: list[Path] = []
        self.over = threading.Event()
        self._waiting = [place.folder / name for name in target.own]
        self._begin([place.folder, *(place.folder / name for name in target.before)])

    def run(self) -> None:
        while not self.over.wait(0.005):
            self._begin([folder for folder in self._waiting if folder.is_dir()])

    def stop(self) -> None:
        self.over.set()
        self.join()

    def lost(self) -> list[str]:
        """Return the files that are missing or changed."""
        kept = [path for path in self.files if path.is_file() and path.read_bytes() == WORDS]
        return [f"the user's {path.parent.name}/{path.name}" for path in self.files if path not in kept]

    def _begin(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            with contextlib.suppress(OSError), (folder / OWN).open("xb") as file:
                file.write(WORDS)
                self.files.append(folder / OWN)
        self._waiting = [folder for folder in self._waiting if folder not in folders]


def processes_of(place: Place) -> list[int]:
    """Return all processes whose TMPDIR is that of the try."""
    found, mark = [], f"TMPDIR={place.temporary}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and not _is_zombie(entry):
                found.append(int(entry.name))
    return found


def _is_zombie(entry: Path) -> bool:
    return (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] in (b"Z", b"X")


def shapes_of(folder: Path) -> frozenset[str]:
    """Return the paths below, without numbers; failed runs and trials, which are kept for inspection, do not count."""
    names = {re.sub(r"\d+", "N", str(path.relative_to(folder))) for path in folder.rglob("*") if path.name != OWN}
    return frozenset(
        name for name in names if not name.startswith(("failed", "ranks/watch")) and not _OF_FAILED.match(name)
    )


class Campaign:
    """Tries in `folder`; those with problems keep their folders."""

    def __init__(self, folder: Path, names: Sequence[str], seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._common = folder / "common"
        make_common(self._common, names)
        needed = [*(["train"] if "report" in names and "train" not in names else []), *names]
        self._whole = {name: self._undisturbed(name) for name in needed}

    def tries(self, name: str, number: int) -> Iterator[Try]:
        """Yield the given number of tries of a command."""
        for each in range(number):
            yield self._tried(name, each)

    def _undisturbed(self, name: str) -> Whole:
        place, began_s = Place(folder=self._common / name, common=self._common), time.monotonic()
        finished = _finished(_started(place, TARGETS[name], again=False))
        assert finished.code == 0, (name, finished)
        lacks = TARGETS[name].lacks(place)
        assert not lacks, (name, lacks)
        return Whole(seconds=time.monotonic() - began_s, shapes=shapes_of(place.out))

    def _tried(self, name: str, number: int) -> Try:
        drawn = random.Random(f"{self._seed} {name} {number}")
        for again in range(MOST_TRIES):
            place = Place(folder=self._folder / f"{name}-{number}-{again}", common=self._common)
            found = Try(command=name, number=number)
            if self._struck(place, TARGETS[name], drawn, found):
                break
            shutil.rmtree(place.folder)
        if not found.problems and not found.lost:
            shutil.rmtree(place.folder, ignore_errors=True)
        return found

    def _struck(self, place: Place, target: Target, drawn: random.Random, found: Try) -> bool:
        """Strike the command and resume it; return False if it was over before."""
        found.way = drawn.choices([*WAYS], OFTEN)[0]
        process = _started(place, target, again=False)
        owner = Owner(place, target)
        owner.start()
        reported = threading.Thread(target=lambda: setattr(found, "said", process.communicate()[1]))
        reported.start()
        try:
            found.moment = self._wait(place, target, process, drawn, self._whole[found.command].seconds)
            there = processes_of(place)
            owner.stop()
            if process.poll() is not None or not _strike(process, there, found, drawn):
                return False
            saved = self._end(place, target, process, found)
            reported.join()
        finally:
            owner.over.set()
            _end_all(place, process)
        self._look(place, target, found)
        found.lost += owner.lost()
        self._go_on(place, target, found, saved)
        found.lost += [one for one in owner.lost() if one not in found.lost]
        return True

    def _wait(
        self, place: Place, target: Target, process: subprocess.Popen[str], drawn: random.Random, span_s: float
    ) -> str:
        """Wait until a random moment: of the time, or of the steps if the command reports them."""
        if target.progress is None or drawn.random() < 0.4:
            seconds = drawn.uniform(0, span_s)
            _until(lambda: process.poll() is not None, seconds)
            return f"after {seconds:.1f} of {span_s:.1f} s"
        step, more_s = drawn.randint(1, target.steps), drawn.choice((0.0, drawn.uniform(0, 1)))
        progress = target.progress
        _until(lambda: process.poll() is not None or progress(place.out) >= step, END_S)
        _until(lambda: process.poll() is not None, more_s)
        return f"{more_s:.2f} s after step {step} of {target.steps}"

    def _end(self, place: Place, target: Target, process: subprocess.Popen[str], found: Try) -> int:
        """Wait until all its processes are gone; return the newest step that was saved then."""
        began_s = time.monotonic()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience(60))
        found.code = process.poll()
        if found.code is None:
            found.problems.append("it had not ended after a minute")
        ended_s = time.monotonic()
        _until(lambda: not processes_of(place), patience(GONE_S))
        found.gone_s = time.monotonic() - (ended_s if found.way in ASKED else began_s)
        if left := processes_of(place):
            found.problems.append(f"{len(left)} processes were left: {' '.join(_program(pid) for pid in left)}")
        return target.saved(place.out)

    def _look(self, place: Place, target: Target, found: Try) -> None:
        """Check the exit code, the last messages, and what is in TMPDIR."""
        nothing_written = not place.out.exists() or all(path.name == OWN for path in place.out.iterdir())
        allowed = {"one process": target.lost_rank, "SIGTERM": target.stopped, "SIGINT": target.stopped}
        codes = [*allowed.get(found.way, (-signal.SIGKILL,))]
        if found.way in ASKED and nothing_written:
            codes += [-WAYS[found.way], 130]  # before Python could catch it
        if found.code not in codes:
            found.problems.append(f"exit code {found.code}, expected one of {codes}: {found.said[-300:]}")
        elif found.way in ("one process", *ASKED) and found.code and found.code > 0:
            last = (found.said.strip().splitlines() or [""])[-1]
            if "Traceback" in found.said or not last.startswith("hpcdl: "):
                found.problems.append(f"no line of its own at the end: {found.said[-600:]}")
        if found.way != "all processes" and (left := _left_in(place)):  # else none is left to remove it
            found.problems.append(f"left in TMPDIR: {left}")

    def _go_on(self, place: Place, target: Target, found: Try, saved: int) -> None:
        """Resume the command to its end, unless this is refused and nothing was saved."""
        again = _finished(_started(place, target, again=True))
        lines = [line for line in again.err.strip().splitlines() if line.startswith("hpcdl: ")]
        if again.code in (2, 3) and len(lines) == 1 and "Traceback" not in again.err:
            found.end = f"refused: {lines[0]}"
            if saved:
                found.lost.append(f"step {saved} was saved, but continuing is refused: {lines[0]}")
            return
        if again.code:
            found.problems.append(f"continuing ended with {again.code}: {again.err[-600:]}")
            return
        found.end = "resumed"
        if lacks := target.lacks(place):
            found.problems.append(f"not whole after continuing: {lacks}")
        if saved and max([0, *record_of(place.out)["resumed_from_steps"]]) < saved:
            found.lost.append(f"step {saved} was saved, it continued from {record_of(place.out)['resumed_from_steps']}")
        strange = sorted(shapes_of(place.out) - self._whole[found.command].shapes)
        if strange:
            found.problems.append(f"nothing has swept {', '.join(strange[:6])}")
        if left := _left_in(place):
            found.problems.append(f"left in TMPDIR after continuing: {left}")


def _started(place: Place, target: Target, *, again: bool) -> subprocess.Popen[str]:
    if not place.folder.exists():
        place.folder.mkdir()
        place.temporary.mkdir()
        (place.folder / "home").mkdir()
        target.prepare(place)
        for name in target.before:
            (place.folder / name).mkdir(exist_ok=True)
    environment = CommandLine(place.folder / "home").environment
    return subprocess.Popen(
        target.again(place) if again else target.words(place),
        cwd=target.cwd(place),
        env={**environment, **target.variables(place), "TMPDIR": str(place.temporary)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _finished(process: subprocess.Popen[str]) -> Finished:
    try:
        _, err = process.communicate(timeout=patience(END_S))
    except subprocess.TimeoutExpired:
        end_family(process.pid)
        _, err = process.communicate()
    return Finished(process.returncode, "", err)


def _strike(process: subprocess.Popen[str], there: Sequence[int], found: Try, drawn: random.Random) -> bool:
    """Send the signal of the try; return False if its target does not exist."""
    others = [pid for pid in there if pid != process.pid and b"python" in program_of(pid)]
    if found.way == "one process" and not others:
        found.way = "the command"
    victims = {"one process": others and [drawn.choice(others)], "all processes": [process.pid, *others, *there]}
    send(WAYS[found.way], victims.get(found.way, [process.pid]))
    return True


def _end_all(place: Place, process: subprocess.Popen[str]) -> None:
    """Kill all processes of a try, whatever its result."""
    send(signal.SIGKILL, [*([process.pid] if process.poll() is None else []), *processes_of(place)])
    process.wait()


def _until(condition: object, longest_s: float) -> None:
    deadline = time.monotonic() + longest_s
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)


def _program(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b" ".join(words[:6]).decode(errors="replace")[:120]
    return ""


def _left_in(place: Place) -> str:
    return ", ".join(sorted(re.sub(r"\d+", "N", path.name) for path in place.temporary.iterdir()))


HEADINGS = ("struck", *WAYS, "continued to the end", "refused in one line", "lost", "other findings")


def table(found: Sequence[Try]) -> str:
    """Return the counts of each command, as Markdown."""
    rows = []
    for name in dict.fromkeys(one.command for one in found):
        own = [one for one in found if one.command == name]
        ways, ends = Counter(one.way for one in own), Counter(one.end.partition(":")[0] for one in own)
        lost, wrong = (sum(bool(getattr(one, what)) for one in own) for what in ("lost", "problems"))
        counts = (*(ways[way] for way in WAYS), ends["resumed"], ends["refused"], lost, wrong)
        rows.append((f"`{name}`", *map(str, counts)))
    total = [sum(int(row[column]) for row in rows) for column in range(1, len(HEADINGS))]
    rows.append(("all", *map(str, total)))
    return "\n".join(f"| {' | '.join(row)} |" for row in (HEADINGS, ["---"] * len(HEADINGS), *rows))
