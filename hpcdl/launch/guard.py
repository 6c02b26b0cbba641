"""A small process beside the one that starts the ranks: it cleans up if that process is killed.

The ranks end within seconds of the starting process. The guard then moves their traces from this node's storage to the
run directory, and marks the run as lost in its record.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hpcdl.core.paths import own_program
from hpcdl.core.records.run_record import LOST, continues, state_of
from hpcdl.run.ended import note_lost, stamp_of
from hpcdl.trace.recorder import collect, collect_abandoned, is_written, trace_files_in

_WAIT = "import os, sys\nif not sys.stdin.buffer.read(): os.execv(sys.argv[1], sys.argv[1:])\n"
"""Waits until the starting process reports the end or dies without a report; imports nothing."""
MOST_S = 20.0
"""Longest wait for the ranks, which end within 10 s of the process that started them."""
TICK_S = 0.2


@contextlib.contextmanager
def guarded(run_dir: Path) -> Iterator[None]:
    """Guard the ranks started inside: if this process is killed, nothing of them stays on this node.

    If the guard of an earlier call was killed too, first collect what the ranks of that call left here.
    """
    collect_abandoned(run_dir)
    line = [sys.executable, "-P", "-S", "-c", _WAIT, *own_program(__name__, str(run_dir))]
    nowhere = subprocess.DEVNULL  # an inherited pipe would keep its reader waiting for the guard
    # A session of its own: Ctrl-C at the terminal must not end the guard together with the ranks.
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
    ) as guard:  # fmt: skip
        assert guard.stdin is not None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the guard was killed
                guard.stdin.write(b"over")
                guard.stdin.close()


def clear_up(run_dir: Path) -> None:
    """Clean up after a killed starting process: wait for the ranks, collect traces, mark the record as lost."""
    trace_files, before = trace_files_in(run_dir), stamp_of(run_dir)
    ends_at = time.monotonic() + MOST_S
    while time.monotonic() < ends_at and (
        any(is_written(path) for _, path in trace_files.values()) or continues(state_of(run_dir))
    ):
        time.sleep(TICK_S)
        trace_files = {**trace_files_in(run_dir), **trace_files}  # include ranks that were just starting
    collect(run_dir, {file: left for file, left in trace_files.items() if not is_written(left[1])})
    # Unchanged: a record rewritten meanwhile stays as it is.
    if state_of(run_dir) == LOST and stamp_of(run_dir) == before:
        note_lost(run_dir, "the process that started the run was killed")


if __name__ == "__main__":
    clear_up(Path(sys.argv[1]))
