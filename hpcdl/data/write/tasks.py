"""Write many shards in this process and in child processes, and yield each one when it is finished.

A child, `python -m hpcdl.data.write.tasks TARGET PARENT CODE [again]`, says `ready`, reads `SPLIT NUMBER` lines and
answers in JSON lines. It dies with the process that started it, and exits when its input ends.

Python takes about a second, and a core, to start. So this process begins to write at once. It starts children only if
the rest would take it more than OTHERS_FROM_S alone. They take shards once they are ready, and are dismissed if they
are not ready by the last shard. Two workers are therefore not slower than one.
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
class WriterSettings:
    """How shards are written: to the folder `target`, or with `again` its work folder, to compare with existing ones.

    `code` is the SHA-256 of the reader that the user has named; the hash stored in the job is not trusted.
    """

    target: Path
    code: str = ""
    again: bool = False


OTHERS_FROM_S = 3.0
"""Children start if more writing time than this remains: their start takes up to a second, and a core."""
_TELLING_S = 0.2
_ERRORS = {error.__name__: error for error in (HpcdlError, UnreadableSample, SourceChanged)}


def write_all(
    settings: WriterSettings, tasks: Sequence[Task], num_samples: int, workers: int, on_samples: OnSamples
) -> Generator[ShardResult]:
    """Write the shards `tasks`, `num_samples` in all, of the target's job with up to `workers` processes.

    `on_samples` gets the numbers of samples written. A caller that stops early must close the generator to end the
    writing.
    """
    if workers > 1 and len(tasks) > 1:
        yield from _with_others(settings, tasks, num_samples, min(workers, len(tasks)) - 1, on_samples)
    elif tasks:
        yield from _here(settings, tasks, on_samples)


def _here(settings: WriterSettings, tasks: Iterable[Task], on_samples: OnSamples) -> Iterator[ShardResult]:
    writer = open_writer(settings)
    try:
        with ThreadPoolExecutor(max_workers=1) as settler:  # the device stores a shard while the next is written
            before: tuple[ShardResult, Future[None]] | None = None
            for split, number in tasks:
                try:
                    result, settle = writer.begin(split, number, on_samples)
                # The shard before is whole: entered now, it is not written again by --resume.
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
    settings: WriterSettings, tasks: Sequence[Task], num_samples: int, others: int, on_samples: OnSamples
) -> Iterator[ShardResult]:
    """Write in a thread of this process and, if it pays, in up to `others` child processes."""
    waiting = deque(tasks)
    pace = _Pace(num_samples)
    processes: list[_Process] = []
    with ExitStack() as stack:
        ready = stack.enter_context(selectors.DefaultSelector())
        own_part = _OwnPart(settings, waiting)
        # Registered first, so last: children are killed before the thread is waited for.
        stack.callback(own_part.stop)
        ready.register(own_part.output, selectors.EVENT_READ, own_part)
        while not own_part.over or any(process.task for process in processes):
            for key, _ in ready.select():
                for document in key.data.hear():
                    if "samples" in document:
                        on_samples(document["samples"])
                        pace.count(document["samples"])
                        continue
                    if "ready" not in document:
                        yield _result(document)
                    if key.data is not own_part and not _give_next(key.data, waiting):
                        ready.unregister(key.fileobj)
                        break
            # Asked after each message: the pace is not known at first, and changes as children help.
            while waiting and len(processes) < others and pace.seconds_left() > OTHERS_FROM_S:
                processes.append(_Process(settings))
                stack.callback(processes[-1].kill)
                ready.register(processes[-1].output, selectors.EVENT_READ, processes[-1])


class _Pace:
    """Estimates how long this process alone would still write, from its progress so far."""

    def __init__(self, num_samples: int) -> None:
        self._left, self._written, self._began = num_samples, 0, 0.0

    def count(self, samples: int) -> None:
        """Count `samples` as done."""
        self._left -= samples
        if not self._began:  # the first ones include the time to open files
            self._began = time.monotonic()
            return
        self._written += samples

    def seconds_left(self) -> float:
        """Return the estimated seconds left; 0 until there is an estimate."""
        passed_s = time.monotonic() - self._began
        return self._left * passed_s / self._written if self._written and passed_s > _TELLING_S else 0.0


def _give_next(process: _Process, waiting: deque[Task]) -> bool:
    """Give a process the next shard; if none is left, end its input and return False."""
    process.task = None
    try:
        process.give(waiting.popleft())
    except IndexError:
        process.end()
        return False
    return True


def _result(document: dict[str, Any]) -> ShardResult:
    if "result" in document:
        shard_result: ShardResult = document["result"]
        return shard_result
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
    """Raised to end the writing thread."""


class _OwnPart:
    """The shards that this process writes, in a thread: the main thread handles the children and Ctrl-C."""

    def __init__(self, settings: WriterSettings, waiting: deque[Task]) -> None:
        self._settings, self._waiting = settings, waiting
        self._split_words: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.output, self._wake = os.pipe()
        os.set_blocking(self._wake, False)  # a full pipe has already woken the main thread and must not block this one
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write, name="hpcdl-writing")
        self.over = False
        self._thread.start()

    def hear(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the thread since the last call."""
        os.read(self.output, 65536)
        with suppress(queue.Empty):
            while True:
                document = self._split_words.get_nowait()
                if "over" in document:
                    self.over = True
                    return
                yield document

    def stop(self) -> None:
        """End the thread, within one block; an unfinished shard is removed."""
        self._stop.set()
        self._thread.join()
        os.close(self.output)
        os.close(self._wake)

    def _write(self) -> None:
        try:
            for result in _here(self._settings, self._taken(), self._report_samples):
                self._send({"result": result})
        except _Stopped:
            return
        except BaseException as error:  # noqa: BLE001  the main thread raises it
            self._send({"raised": error})
        self._send({"over": True})

    def _taken(self) -> Iterator[Task]:
        with suppress(IndexError):
            while not self._stop.is_set():
                yield self._waiting.popleft()  # atomic: the main thread takes from the same deque

    def _report_samples(self, samples: int) -> None:
        if self._stop.is_set():
            raise _Stopped
        self._send({"samples": samples})

    def _send(self, document: dict[str, Any]) -> None:
        # Before the byte: who is woken must find the message.
        self._split_words.put(document)
        with suppress(BlockingIOError):
            os.write(self._wake, b".")


class _Process:
    """One child process and the shard it writes."""

    def __init__(self, settings: WriterSettings) -> None:
        arguments = (str(settings.target), str(os.getpid()), settings.code, *["again"] * settings.again)
        command = own_program("hpcdl.data.write.tasks", *arguments)
        # stderr is inherited: messages of a crashing interpreter must reach the user.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self._rest = b""
        self._ended = False
        self.task: Task | None = None

    def give(self, task: Task) -> None:
        """Give the process a shard to write."""
        self.task = task
        with suppress(BrokenPipeError):  # it died: `hear` reports it
            self._input.write(f"{task[0]} {task[1]}\n".encode())
            self._input.flush()

    def hear(self) -> list[dict[str, Any]]:
        """Return the messages of the process since the last call; HpcdlError if it died."""
        content = os.read(self.output.fileno(), 65536)
        if not content:
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise HpcdlError(f"a writing process died ({how}); run the same command with --resume")
        # A read may end within a line.
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Close the input of the process, so that it exits."""
        self._ended = True
        with suppress(BrokenPipeError):
            self._input.close()

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self._process.poll() is None and not self._ended:
            self._process.kill()
        self.end()
        self.output.close()
        self._process.wait()


def main() -> None:
    """Run a child process: write shards until the input ends."""
    target, parent, code, *again = sys.argv[1:]
    end_with_parent(int(parent))
    streams.ignore(signal.SIGINT, signal.SIGHUP)  # they reach the whole process group; the parent decides
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a user's reader, even from C, must not mix with the answers
    writer = open_writer(WriterSettings(target=Path(target), code=code, again=bool(again)))

    def send(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

    send({"ready": True})
    for line in sys.stdin:
        split, _, number = line.strip().rpartition(" ")
        try:
            result = writer.write(split, int(number), lambda count: send({"samples": count}))
        except HpcdlError as error:
            send({"error": str(error), "exit_code": error.exit_code, "type": type(error).__name__})
        except OSError as error:
            send({"errno": error.errno, "error": error.strerror or str(error)})
        else:
            send({"done": dataclasses.asdict(result)})


def open_writer(settings: WriterSettings) -> ShardWriter:
    """Return the writer of the job stored in the target's work folder."""
    work = settings.target / WORK_NAME
    job = read_job(work)
    if job.spec.reader_digest != settings.code:
        raise CorruptError(f"the job in {work} names another reader than the command line; run the same command again")
    return ShardWriter(work / REPAIRED if settings.again else settings.target, job, open_source(job.spec), Index(work))


if __name__ == "__main__":
    main()
