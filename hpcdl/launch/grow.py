"""Growing back: a run that goes on with fewer workers than planned has more again, once there is a place for them.

Beside each launch the starting process looks for nodes that were lost and answer again, and for the user's request
(`hpcdl jobs grow`). In both cases it asks the ranks to save and leave (supervision/control.py); new ones start
from that checkpoint (relaunch.py). So to grow is to resume on more workers, whatever the strategy.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcdl.cluster.status import FOLDER, read_statuses
from hpcdl.config.load import ResolvedConfig
from hpcdl.config.schema import ScriptConfig, TrainConfig
from hpcdl.core.errors import UsageError
from hpcdl.core.storage.disk import is_own_file, make_folder, remove_file, touch
from hpcdl.core.storage.lock import check_free
from hpcdl.launch.slots import RankSlots
from hpcdl.run import rundir
from hpcdl.run.journal import FileJournal
from hpcdl.supervision.control import LEAVE

REQUEST = "grow"
"""The user's request, a file beside the ranks' words."""
LOOK_S, TICK_S = 30.0, 0.5
"""How often nodes are looked for that come back, and how often the request."""


class Growth:
    """What is looked for beside one launch of `num_ranks` ranks; `num_workers` of so many ranks there would be.

    `back` and `asked` say what there is room on once the ranks have left, `num_left` how many were still at work.
    """

    def __init__(self, run_dir: Path, places: RankSlots, num_ranks: int, num_workers: Callable[[int], int]) -> None:
        self._run_dir, self._places, self._num_ranks, self._num_workers = run_dir, places, num_ranks, num_workers
        self._leave, self._request = run_dir / FOLDER / LEAVE, run_dir / FOLDER / REQUEST
        self._over = threading.Event()
        self.back: list[str] = []
        self.asked = False
        self.num_left = num_ranks

    def granted(self) -> str:
        """There is room now: what has come back, in words. A request that was not granted yet is the next launch's."""
        remove_file(self._request)
        return self._places.take(self.back, asked=self.asked)

    @contextlib.contextmanager
    def looked_for(self) -> Iterator[None]:
        """Inside, a thread looks."""
        remove_file(self._leave)
        threading.Thread(target=self._look, name="growth", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()  # it may be asking a node that does not answer: nobody waits for that
            remove_file(self._leave)

    def _look(self) -> None:
        looked_s = time.monotonic()
        while not self._over.wait(TICK_S):
            if self._leave.exists():
                continue
            asked = is_own_file(self._request)
            due = time.monotonic() - looked_s >= LOOK_S and self._places.awaited(asked=False)
            if not asked and not due:
                continue
            back = self._places.back(asked=asked)
            looked_s = time.monotonic()
            if self._over.is_set():  # the request is the next launch's
                return
            self._decide(back, asked=asked)

    def _decide(self, back: list[str], *, asked: bool) -> None:
        """Ask the ranks to leave where there can be more workers; say why not where the user wants to know."""
        left_behind = sum(one.state == "left behind" for one in read_statuses(self._run_dir / FOLDER))
        self.num_left = self._num_ranks - left_behind
        now = self._num_workers(self.num_left)
        then = self._num_workers(self._places.num_ranks_with(back, asked=asked))
        if then > now:
            self.back, self.asked = back, asked
            why = f"{' and '.join(back)} can be used again" if back else "more workers were asked for"
            self._log(f"{why}: the ranks save and leave, to go on with {then} workers in place of {now}")
            touch(self._leave)
        elif asked:
            self._log(f"more workers were asked for, but {'; '.join(self._hindrances(now)) or f'all {now} are there'}")
            remove_file(self._request)

    def _hindrances(self, now: int) -> Iterator[str]:
        """What keeps the run at `now` workers."""
        if awaited := self._places.awaited(asked=True):
            yield f"{' and '.join(awaited)} cannot be used (no answer, or no more in this job)"
        if failed := self._places.failed_twice:
            yield f"{' and '.join(failed)}, which failed twice, {'stays' if len(failed) == 1 else 'stay'} left out"

    def _log(self, text: str) -> None:
        with contextlib.closing(FileJournal(self._run_dir)) as journal:
            journal.write("message", text=text)


def ask_to_grow(run_dir: Path) -> None:
    """Leave the request for more workers with the run in `run_dir`; UsageError where it could not be heard."""
    if not (run_dir / rundir.CONFIG_FILE).is_file():
        raise UsageError(f"{run_dir} is not a run directory: it holds no {rundir.CONFIG_FILE}")
    if run_dir.stat().st_uid != os.geteuid():
        raise UsageError(f"{run_dir} belongs to another user, who alone may ask that run for more workers")
    if not _resolved(run_dir).config.checkpoint.elastic:
        raise UsageError(f"{run_dir} runs without --elastic, and keeps its workers; resume it with --elastic")
    try:
        check_free(run_dir)
    except UsageError:  # its process holds it: it is there
        make_folder(run_dir / FOLDER)
        touch(run_dir / FOLDER / REQUEST)
        return
    raise UsageError(f"{run_dir} is not running; restart it with --resume, on as many --ranks as there are")


def _resolved(run_dir: Path) -> ResolvedConfig[TrainConfig] | ResolvedConfig[ScriptConfig]:
    with contextlib.suppress(UsageError):
        return rundir.read(run_dir)[0]
    return rundir.read_as(ScriptConfig, run_dir)[0]
