"""Writes many shards, here and in processes beside this one, and hands over each one as it is finished.

Such a process, `python -m hpcdl.data.write.tasks TARGET PARENT CODE [again]`, says `ready`, takes `SPLIT NUMBER` lines
and answers in JSON lines. It dies with the process that started it, and ends when its input does.

Python takes a second or so to start, and a core while it does. So this process begins to write at once. The others are
started when the rest would keep it busy for longer than that is worth, take shards once they are ready, and are let go
if they are not by the last shard. So two workers are not slower than one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError, HpcdlError
from hpcdl.core.paths import own_program
from hpcdl.core.processes import streams
from hpcdl.core.processes.lifeline import end_with_parent
from hpcdl.core.records.run_record import from_json
from hpcdl.data.sources.base.source import Index, SourceChanged, UnreadableSample, open_source
from hpcdl.data.write.plan import REPAIRED, WORK_NAME, read_job
from hpcdl.data.write.shards import ShardResult, ShardWriter

Task = tuple[str, int]
OnSamples = Callable[[int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WritingPlace:
    """Where shards are written: the `target` folder; `again`: below its work folder, to be held against those there.

    `code` is the SHA-256 of the reader that the user has named: the job's own word for it is not taken.
    """

    target: Path
    code: str = ""
    again: bool = False


OTHERS_FROM_S = 3.0
"""Writing that is left when others are started: their start takes up to a second, and a core meanwhile."""
_TELLING_S = 0.2
_ERRORS = {error.__name__: error for error in (HpcdlError, UnreadableSample, SourceChanged)}


def write_all(
    place: WritingPlace, tasks: Sequence[Task], num_samples: int, workers: int, on_samples: OnSamples
) -> Generator[ShardResult]:
    """Write the shards `tasks` of the job in the place's target, `num_samples` in all, with up to so many processes.

    `on_samples` hears of samples when done. Whoever does not take all of it must close it, or the writing goes on.
    """
    if workers > 1 and len(tasks) > 1:
        yield from _with_others(place, tasks, num_samples, min(workers, len(tasks)) - 1, on_samples)
    elif tasks:
        yield from _here(place, tasks, on_samples)


def _here(place: WritingPlace, tasks: Iterable[Task], on_samples: OnSamples) -> Iterator[ShardResult]:
    writer = open_writer(place)
    try:
        with ThreadPoolExecutor(max_workers=1) as settler:  # the device takes a shard in while the next is written
            before: tuple[ShardResult, Future[None]] | None = None
            for split, number in tasks:
                try:
                    result, settle = writer.begin(split, number, on_samples)
                except BaseException:
                    if before is not None:
                        yield _settled(*before)
                    raise
                if before is not None:
                    yield _settled(*before)
                before = result, settler.submit(settle)
            if before is not None:
                yield _settled(*before)
    finally:
        writer.close()


def _settled(result: ShardResult, durable: Future[None]) -> ShardResult:
    durable.result()
    return result


def _with_others(
    place: WritingPlace, tasks: Sequence[Task], num_samples: int, others: int, on_samples: OnSamples
) -> Iterator[ShardResult]:
    """Write in a thread of this process and, where it pays, in `others` more."""
    waiting = deque(tasks)
    pace = _Pace(num_samples)
    processes: list[_Process] = []
    with ExitStack() as stack:
        ready = stack.enter_context(selectors.DefaultSelector())
        own = _OwnPart(place, waiting)
        stack.callback(own.stop)
        ready.register(own.output, selectors.EVENT_READ, own)
        while not own.over or any(process.task for process in processes):
            for key, _ in ready.select():
                for document in key.data.hear():
                    if "samples" in document:
                        on_samples(document["samples"])
                        pace.count(document["samples"])
                        continue
                    if "ready" not in document:
                        yield _result(document)
                    if key.data is not own and not _give_next(key.data, waiting):
                        ready.unregister(key.fileobj)
                        break
            while waiting and len(processes) < others and pace.seconds_left() > OTHERS_FROM_S:
                processes.append(_Process(place))
                stack.callback(processes[-1].kill)
                ready.register(processes[-1].output, selectors.EVENT_READ, processes[-1])


class _Pace:
    """How long this process alone would still write, by what it has written so far."""

    def __init__(self, num_samples: int) -> None:
        self._left, self._written, self._began = num_samples, 0, 0.0

    def count(self, samples: int) -> None:
        """So many samples are done."""
        self._left -= samples
        if not self._began:  # the first ones tell of the opening of files
            self._began = time.monotonic()
            return
        self._written += samples

    def seconds_left(self) -> float:
        """0 until it can be told."""
        taken = time.monotonic() - self._began
        return self._left * taken / self._written if self._written and taken > _TELLING_S else 0.0


def _give_next(process: _Process, waiting: deque[Task]) -> bool:
    """Have a process write the next shard; False where none is left, and its input has ended."""
    process.task = None
    try:
        process.give(waiting.popleft())
    except IndexError:
        process.end()
        return False
    return True


def _result(document: dict[str, Any]) -> ShardResult:
    if "result" in document:
        found: ShardResult = document["result"]
        return found
    if "raised" in document:
        raise document["raised"]
    if "done" in document:
        return from_json(ShardResult, document["done"])
    if "errno" in document:
        raise OSError(document["errno"], document["error"])
    error = _ERRORS.get(document["type"], HpcdlError)(document["error"])
    error.exit_code = document["exit_code"]
    raise error


class _Stopped(Exception):
    """The thread that writes is to end."""


class _OwnPart:
    """The shards that this process writes, in a thread: the main one hears of the others, and of Ctrl-C."""

    def __init__(self, place: WritingPlace, waiting: deque[Task]) -> None:
        self._place, self._waiting = place, waiting
        self._said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.output, self._wake = os.pipe()
        os.set_blocking(self._wake, False)  # a byte too many wakes nobody, and must not keep the thread
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="hpcdl-writing")
        self.over = False
        self._thread.start()

    def hear(self) -> Iterator[dict[str, Any]]:
        """What it said since."""
        os.read(self.output, 65536)
        with suppress(queue.Empty):
            while True:
                document = self._said.get_nowait()
                if "over" in document:
                    self.over = True
                    return
                yield document

    def stop(self) -> None:
        """End the thread, within a block; a shard that is not whole is removed."""
        self._stop.set()
        self._thread.join()
        os.close(self.output)
        os.close(self._wake)

    def _write(self) -> None:
        try:
            for result in _here(self._place, self._taken(), self._told):
                self._say({"result": result})
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            self._say({"raised": error})
        self._say({"over": True})

    def _taken(self) -> Iterator[Task]:
        with suppress(IndexError):
            while not self._stop.is_set():
                yield self._waiting.popleft()

    def _told(self, samples: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._say({"samples": samples})

    def _say(self, document: dict[str, Any]) -> None:
        self._said.put(document)
        with suppress(BlockingIOError):
            os.write(self._wake, b".")


class _Process:
    """One writing process and the shard it is at."""

    def __init__(self, place: WritingPlace) -> None:
        words = (str(place.target), str(os.getpid()), place.code, *["again"] * place.again)
        command = own_program("hpcdl.data.write.tasks", *words)
        # stderr stays the parent's: what a dying interpreter says should be read.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self._rest = b""
        self._ended = False
        self.task: Task | None = None

    def give(self, task: Task) -> None:
        """Have it write a shard."""
        self.task = task
        with suppress(BrokenPipeError):  # it died: `hear` will tell
            self._input.write(f"{task[0]} {task[1]}\n".encode())
            self._input.flush()

    def hear(self) -> list[dict[str, Any]]:
        """What it said since; HpcdlError where it died."""
        content = os.read(self.output.fileno(), 65536)
        if not content:
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise HpcdlError(f"a writing process died ({how}); run the same command with --resume")
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Let it go: its input ends."""
        self._ended = True
        with suppress(BrokenPipeError):
            self._input.close()

    def kill(self) -> None:
        """End it now, if it still runs."""
        if self._process.poll() is None and not self._ended:
            self._process.kill()
        self.end()
        self.output.close()
        self._process.wait()


def main() -> None:
    """A writing process: write shards until the input ends."""
    target, parent, code, *again = sys.argv[1:]
    end_with_parent(int(parent))
    streams.ignore(signal.SIGINT, signal.SIGHUP)  # they reach the whole group; the parent decides
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's reader prints, be it from C, must not come between the answers
    writer = open_writer(WritingPlace(target=Path(target), code=code, again=bool(again)))

    def say(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    say({"ready": True})
    for line in sys.stdin:
        split, _, number = line.strip().rpartition(" ")
        try:
            result = writer.write(split, int(number), lambda count: say({"samples": count}))
        except HpcdlError as error:
            say({"error": str(error), "exit_code": error.exit_code, "type": type(error).__name__})
        except OSError as error:
            say({"errno": error.errno, "error": error.strerror or str(error)})
        else:
            say({"done": dataclasses.asdict(result)})


def open_writer(place: WritingPlace) -> ShardWriter:
    """The writer of the job that is kept in the target's work folder."""
    work = place.target / WORK_NAME
    job = read_job(work)
    if job.spec.reader_digest != place.code:
        raise CorruptError(f"the job in {work} names another reader than the command line; run the same command again")
    return ShardWriter(work / REPAIRED if place.again else place.target, job, open_source(job.spec), Index(work))


if __name__ == "__main__":
    main()
