"""Writes many shards, here or in processes of their own, and hands over each one as it is finished.

Such a process, `python -m hpcdl.data.write.tasks TARGET PARENT`, takes `SPLIT NUMBER` lines and answers in JSON lines.
It dies with the process that started it, and ends when its input does.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcdl.core import signals
from hpcdl.core.errors import CorruptError, HpcdlError
from hpcdl.core.lifeline import end_with_parent
from hpcdl.core.paths import own_program
from hpcdl.core.records import from_json
from hpcdl.data.sources.base.index import Index
from hpcdl.data.sources.base.source import SourceChanged, UnreadableSample, open_source
from hpcdl.data.write.plan import WORK_NAME, read_job
from hpcdl.data.write.shards import ShardResult, ShardWriter

Task = tuple[str, int]
Told = Callable[[int], None]
_ERRORS = {error.__name__: error for error in (HpcdlError, UnreadableSample, SourceChanged)}


def write_all(target: Path, tasks: Sequence[Task], workers: int, told: Told, code: str = "") -> Iterator[ShardResult]:
    """Write the shards `tasks` of the job in `target` with so many processes; `told` hears of samples when done.

    `code` is the SHA-256 of the reader that the user has named: the job's own word for it is not taken.
    """
    if workers > 1 and len(tasks) > 1:
        return _in_processes(target, tasks, min(workers, len(tasks)), told, code)
    return _here(target, tasks, told, code)


def _here(target: Path, tasks: Sequence[Task], told: Told, code: str) -> Iterator[ShardResult]:
    if not tasks:
        return
    writer = open_writer(target, code)
    try:
        with ThreadPoolExecutor(max_workers=1) as settler:  # the device takes a shard in while the next is written
            before: tuple[ShardResult, Future[None]] | None = None
            for split, number in tasks:
                try:
                    result, settle = writer.begin(split, number, told)
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


def _in_processes(target: Path, tasks: Sequence[Task], workers: int, told: Told, code: str) -> Iterator[ShardResult]:
    waiting = list(reversed(tasks))
    with selectors.DefaultSelector() as ready:
        processes = [_Process(target, code) for _ in range(workers)]
        try:
            for process in processes:
                ready.register(process.output, selectors.EVENT_READ, process)
                process.give(waiting.pop())
            while any(process.task for process in processes):
                for key, _ in ready.select():
                    process = key.data
                    for document in process.hear():
                        if "samples" in document:
                            told(document["samples"])
                            continue
                        yield _result(document)
                        process.task = None
                        if waiting:
                            process.give(waiting.pop())
                        else:
                            process.end()
                            ready.unregister(process.output)
                            break
        finally:
            for process in processes:
                process.kill()


def _result(document: dict[str, Any]) -> ShardResult:
    if "done" in document:
        return from_json(ShardResult, document["done"])
    if "errno" in document:
        raise OSError(document["errno"], document["error"])
    error = _ERRORS.get(document["type"], HpcdlError)(document["error"])
    error.exit_code = document["exit_code"]
    raise error


class _Process:
    """One writing process and the shard it is at."""

    def __init__(self, target: Path, code: str) -> None:
        command = own_program("hpcdl.data.write.tasks", str(target), str(os.getpid()), code)
        # stderr stays the parent's: what a dying interpreter says should be read.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self.output = self._process.stdin, self._process.stdout
        self._rest = b""
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
        with suppress(BrokenPipeError):
            self._input.close()

    def kill(self) -> None:
        """End it now, if it still runs."""
        if self._process.poll() is None and self.task is not None:
            self._process.kill()
        self.end()
        self.output.close()
        self._process.wait()


def main() -> None:
    """A writing process: write shards until the input ends."""
    parent = int(sys.argv[2])
    end_with_parent(parent)
    signals.ignore(signal.SIGINT, signal.SIGHUP)  # they reach the whole group; the parent decides
    target = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a user's reader prints, be it from C, must not come between the answers
    writer = open_writer(target, sys.argv[3])

    def say(document: dict[str, Any]) -> None:
        answers.write(json.dumps(document) + "\n")
        answers.flush()

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


def open_writer(target: Path, code: str = "") -> ShardWriter:
    """The writer of the job that is kept in the target's work folder; `code` is the SHA-256 of its reader."""
    work = target / WORK_NAME
    job = read_job(work)
    if job.spec.reader_digest != code:
        raise CorruptError(f"the job in {work} names another reader than the command line; run the same command again")
    return ShardWriter(target, job, open_source(job.spec), Index(work))


if __name__ == "__main__":
    main()
