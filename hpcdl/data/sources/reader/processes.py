"""Child processes that read a reader's items for the list of samples; the parent puts their results in order.

Each child, `python -m hpcdl.data.sources.reader.source SPEC DIGEST LOCATION PARENT`, runs the user's reader itself. It
reads a JSON line with some items. For each of them it writes a JSON line followed by the bytes to keep.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from hpcdl.core.errors import HpcdlError, SourceError
from hpcdl.core.paths import own_program
from hpcdl.core.processes import streams
from hpcdl.core.processes.lifeline import end_with_parent
from hpcdl.data.sources.reader.samples import item_of, item_text
from hpcdl.data.sources.reader.spool import NotedSample, NotedValue

OTHERS_FROM_S = 3.0
"""Children start if more reading time than this remains: Python and the reader's libraries take a second or more."""
TELLING_S = 0.2
"""Reading time after which the time per item can be estimated."""
_CHUNK_S = 0.2
_MOST_CHUNK = 1024
_AHEAD = 3
"""Chunks per process that are requested before the first result is used."""

Found = NotedSample | SourceError
ReadItem = Callable[[str, Any, Collection[str]], NotedSample]


@dataclass(frozen=True, kw_only=True)
class ItemsLeft:
    """The unread rest of a stream: `item_s` is the time per item, `keep` names the values to keep."""

    stream: str
    items: Sequence[Any]
    item_s: float
    keep: Collection[str]


def read_items(command: Sequence[str], left: ItemsLeft, workers: int) -> Iterator[Found]:
    """Yield the results of `workers` processes, in the order of the items; SourceError in place of an unreadable item.

    Raises HpcdlError if a process dies; its own messages are on stderr.
    """
    size = min(_MOST_CHUNK, max(1, int(_CHUNK_S / max(left.item_s, 1e-6))))
    chunks = [left.items[first : first + size] for first in range(0, len(left.items), size)]
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        processes: list[_Process] = []
        free: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        for _ in range(workers):
            processes.append(_Process(command))
            stack.callback(processes[-1].kill)
            free.put(processes[-1])
        # Registered last, so first: no chunk begins any more when processes are killed, whose end ends the threads.
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)

        def found_of(chunk: Sequence[Any]) -> list[Found]:
            process = free.get()
            try:
                return process.found(left.stream, chunk, left.keep)
            finally:
                free.put(process)

        futures: deque[Future[list[Found]]] = deque()
        for chunk in chunks:
            futures.append(pool.submit(found_of, chunk))
            # A limit on what is read and not yet used: its values are in memory.
            if len(futures) >= _AHEAD * workers:
                yield from futures.popleft().result()
        while futures:
            yield from futures.popleft().result()
        for process in processes:
            process.end()


class _Process:
    """One process that reads."""

    def __init__(self, command: Sequence[str]) -> None:
        # stderr is inherited: output of the reader, and of a crashing interpreter, must reach the user.
        self._process = subprocess.Popen(
            [*own_program("hpcdl.data.sources.reader.source", *command), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._ended = False

    def found(self, stream: str, items: Sequence[Any], keep: Collection[str]) -> list[Found]:
        """Return the process's results for these items."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"stream": stream, "items": [item_text(item) for item in items], "keep": sorted(keep)}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            return [_received(self._process.stdout) for _ in items]
        except (BrokenPipeError, EOFError) as error:
            code = self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise HpcdlError(
                f"a process that reads with the reader died ({how}); with --workers 1 one process reads alone"
            ) from error

    def end(self) -> None:
        """Close the input of the process, so that it exits."""
        assert self._process.stdin is not None
        self._ended = True
        with suppress(BrokenPipeError):  # it died before it had read all requests
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process unless its input has been closed."""
        assert self._process.stdout is not None
        if not self._ended:
            self._process.kill()
        self.end()
        self._process.wait()
        self._process.stdout.close()


def serve(read: ReadItem, parent: int) -> None:
    """Read items as the parent requests, until the parent exits or closes the input."""
    end_with_parent(parent)
    streams.ignore(signal.SIGINT, signal.SIGHUP)  # they reach the whole process group; the parent decides
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a reader, even from C, must not mix with the answers
    for line in sys.stdin:
        request = json.loads(line)
        for text in request["items"]:
            try:
                _answer(answers, read(request["stream"], item_of(text), request["keep"]))
            except SourceError as error:
                answers.write(json.dumps({"error": str(error)}).encode() + b"\n")
        answers.flush()


def _answer(answers: IO[bytes], sample: NotedSample) -> None:
    values = [
        [
            name,
            value.text,
            value.dtype.str,
            value.shape,
            value.finite,
            None if value.content is None else len(value.content),
        ]
        for name, value in sample.values.items()
    ]
    head = {"split": sample.split, "roles": sample.roles, "digest": sample.digest, "values": values}
    answers.write(json.dumps(head).encode() + b"\n")
    for value in sample.values.values():
        if value.content is not None:
            answers.write(value.content)


def _received(answers: IO[bytes]) -> Found:
    line = answers.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    head = json.loads(line)
    if "error" in head:
        return SourceError(head["error"])
    values = {}
    for name, text, dtype, shape, finite, size in head["values"]:
        content = None if size is None else answers.read(size)
        if content is not None and len(content) < size:
            raise EOFError
        values[name] = NotedValue(text=text, dtype=np.dtype(dtype), shape=tuple(shape), content=content, finite=finite)
    roles = head["roles"] and (tuple(head["roles"][0]), tuple(head["roles"][1]))
    return NotedSample(values=values, split=head["split"], roles=roles, digest=head["digest"])
