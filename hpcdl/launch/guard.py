"""A small process beside the one that starts the ranks: it clears up where that one is killed and cannot.

The ranks end within seconds of it. Then their traces come from this node's storage into the run directory, and the
record says that the run was lost.
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
from hpcdl.trace.recorder import collect, collect_abandoned, is_written, places_in

_WAIT = "import os, sys\nif not sys.stdin.buffer.read(): os.execv(sys.argv[1], sys.argv[1:])\n"
"""Waits until the process that has started it says that all is over, or is gone without a word; imports nothing."""
MOST_S = 20.0
"""Ranks end within 10 s of the process that has started them."""
TICK_S = 0.2


@contextlib.contextmanager
def guarded(run_dir: Path) -> Iterator[None]:
    """Inside, ranks may be started; if this process is killed meanwhile, nothing of them stays on this node.

    Where the guard of an earlier call was killed too, this one fetches first what that call's ranks have left here.
    """
    collect_abandoned(run_dir)
    line = [sys.executable, "-P", "-S", "-c", _WAIT, *own_program(__name__, str(run_dir))]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
    ) as guard:  # fmt: skip
        assert guard.stdin is not None
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # somebody has killed it
                guard.stdin.write(b"over")
                guard.stdin.close()


def clear_up(run_dir: Path) -> None:
    """What is left to do for a run whose starting process is gone, once its ranks are."""
    places, before = places_in(run_dir), stamp_of(run_dir)
    ends_at = time.monotonic() + MOST_S
    while time.monotonic() < ends_at and (
        any(is_written(path) for _, path in places.values()) or continues(state_of(run_dir))
    ):
        time.sleep(TICK_S)
        places = {**places_in(run_dir), **places}  # ranks that were just starting
    collect(run_dir, {place: left for place, left in places.items() if not is_written(left[1])})
    if state_of(run_dir) == LOST and stamp_of(run_dir) == before:
        note_lost(run_dir, "the process that started the run was killed")


if __name__ == "__main__":
    clear_up(Path(sys.argv[1]))
