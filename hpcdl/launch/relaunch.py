"""Automatic continuation of a run, `--elastic`: new ranks replace lost ones from the newest checkpoint on.

New ranks start on the remaining nodes (slots.py). If these hold fewer workers, the run continues with fewer
(run/shrink.py), down to `--min-workers`, until more are possible again. During each launch the starting process
looks for lost nodes that answer again, and for the user's request (`hpcdl jobs grow`). In both cases it asks the
ranks to save and leave (supervision/control.py). Growing is thus a resume on more workers, for every strategy.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hpcdl.checkpoint.folders import FOLDER as CHECKPOINTS
from hpcdl.checkpoint.folders import list_checkpoints
from hpcdl.checkpoint.memory import newest_copy
from hpcdl.cluster.launchers.base import Launcher
from hpcdl.cluster.status import FOLDER, read_statuses
from hpcdl.cluster.status import FOLDER as STATUS_FOLDER
from hpcdl.config.load import ResolvedConfig, replace
from hpcdl.config.schema import ScriptConfig, TrainConfig
from hpcdl.core.errors import RankError, StoppedEarly, UsageError
from hpcdl.core.storage.disk import is_own_file, make_folder, move_over, remove_file, touch
from hpcdl.core.storage.lock import check_free
from hpcdl.launch.slots import RankSlots
from hpcdl.run import rundir
from hpcdl.run.faults import NETWORK, parse_faults
from hpcdl.run.journal import FileJournal
from hpcdl.run.shrink import describe_change, num_workers, shrink_config
from hpcdl.supervision.control import LEAVE, SPENT_VARIABLE

REQUEST = "grow"
"""The user's request: a file beside the status files of the ranks."""
LOOK_S, TICK_S = 30.0, 0.5
"""Interval between looks for returned nodes, and between looks for a request."""


class Growth:
    """The watch for more workers during one launch of `num_ranks` ranks.

    `num_workers` maps a number of ranks to a number of workers. `back` and `asked` say why the ranks were asked to
    leave: returned nodes, a request. `num_left` ranks still worked then.
    """

    def __init__(self, run_dir: Path, slots: RankSlots, num_ranks: int, num_workers: Callable[[int], int]) -> None:
        self._run_dir, self._slots, self._num_ranks, self._num_workers = run_dir, slots, num_ranks, num_workers
        self._leave, self._request = run_dir / FOLDER / LEAVE, run_dir / FOLDER / REQUEST
        self._over = threading.Event()
        self.back: list[str] = []
        self.asked = False
        self.num_left = num_ranks

    def granted(self) -> str:
        """Take back the nodes that answer again, and describe them. An ungranted request is left to the next launch."""
        remove_file(self._request)
        return self._slots.take(self.back, asked=self.asked)

    @contextlib.contextmanager
    def looked_for(self) -> Iterator[None]:
        """Look for more workers in a thread while the context is open."""
        remove_file(self._leave)
        threading.Thread(target=self._look, name="growth", daemon=True).start()
        try:
            yield
        finally:
            self._over.set()  # the thread may still wait for a node that does not answer; do not join it
            remove_file(self._leave)

    def _look(self) -> None:
        looked_s = time.monotonic()
        while not self._over.wait(TICK_S):
            if self._leave.exists():
                continue
            asked = is_own_file(self._request)  # a file of another user who may write there does not count
            due = time.monotonic() - looked_s >= LOOK_S and self._slots.awaited(asked=False)
            if not asked and not due:
                continue
            back = self._slots.back(asked=asked)
            looked_s = time.monotonic()
            if self._over.is_set():  # leave the request to the next launch
                return
            self._decide(back, asked=asked)

    def _decide(self, back: list[str], *, asked: bool) -> None:
        """Ask the ranks to leave if more workers are possible; if not, and the user asked, log the reason."""
        num_left_behind = sum(status.state == "left behind" for status in read_statuses(self._run_dir / FOLDER))
        self.num_left = self._num_ranks - num_left_behind
        num_now = self._num_workers(self.num_left)
        num_then = self._num_workers(self._slots.num_ranks_with(back, asked=asked))
        if num_then > num_now:
            self.back, self.asked = back, asked  # before the file: the ranks may leave at once
            why = f"{' and '.join(back)} can be used again" if back else "more workers were asked for"
            self._log(f"{why}: the ranks save and leave, to continue with {num_then} workers in place of {num_now}")
            touch(self._leave)
        elif asked:
            self._log(
                f"more workers were asked for, but {'; '.join(self._hindrances(num_now)) or f'all {num_now} are there'}"
            )
            remove_file(self._request)

    def _hindrances(self, now: int) -> Iterator[str]:
        """Yield the reasons why the run stays at `now` workers."""
        if awaited := self._slots.awaited(asked=True):
            yield f"{' and '.join(awaited)} cannot be used (no answer, or no more in this job)"
        if failed := self._slots.failed_twice:
            yield f"{' and '.join(failed)}, which failed twice, {'stays' if len(failed) == 1 else 'stay'} left out"

    def _log(self, text: str) -> None:
        with contextlib.closing(FileJournal(self._run_dir)) as journal:
            journal.write("message", text=text)


def ask_to_grow(run_dir: Path) -> None:
    """Write the request for more workers into `run_dir`. Raises UsageError if no running process would read it."""
    if not (run_dir / rundir.CONFIG_FILE).is_file():
        raise UsageError(f"{run_dir} is not a run directory: it holds no {rundir.CONFIG_FILE}")
    if run_dir.stat().st_uid != os.geteuid():
        raise UsageError(f"{run_dir} belongs to another user, who alone may ask that run for more workers")
    if not _resolved(run_dir).config.checkpoint.elastic:
        raise UsageError(f"{run_dir} runs without --elastic, and keeps its workers; resume it with --elastic")
    try:
        check_free(run_dir)
    except UsageError:  # the run's process holds the lock, so it is running
        make_folder(run_dir / FOLDER)
        touch(run_dir / FOLDER / REQUEST)
        return
    raise UsageError(f"{run_dir} is not running; restart it with --resume, on as many --ranks as there are")


def _resolved(run_dir: Path) -> ResolvedConfig[TrainConfig] | ResolvedConfig[ScriptConfig]:
    with contextlib.suppress(UsageError):
        return rundir.read(run_dir)[0]
    return rundir.read_as(ScriptConfig, run_dir)[0]


TRIES = 3
"""Consecutive starts that may be lost without a new checkpoint between them."""


def check_starts_ranks(elastic: bool, launcher: str) -> None:
    """Raise UsageError for --elastic if another launcher started the ranks: only it could start new ones."""
    if elastic:
        raise UsageError(
            f"--elastic: {launcher} has started the ranks, and new ones are its own to start; "
            "leave the start to hpcdl (--ranks N), or --elastic out"
        )


def until_done(
    launch: Callable[[ResolvedConfig[Any], Mapping[str, str]], None],
    launcher: Launcher,
    run_dir: Path,
    resolved: ResolvedConfig[Any],
    facts: Mapping[str, Any],
    log: Callable[[str], None],
) -> None:
    """Call `launch` until it returns, restarting lost ranks; without --elastic call it once.

    `launch` receives the run's settings and environment variables for the launcher. Between two launches the journal
    and `log` get a line, and run.toml the new number of ranks. Raises RankError if a rank fails through its own fault
    or TRIES starts bring no progress, StoppedEarly if fewer than --min-workers workers are left.
    """
    checkpoint, current = resolved.config.checkpoint, resolved
    slots = RankSlots(launcher, resolved.config.run.ranks)
    began_s = time.monotonic()
    spent: dict[str, str] = {}
    lost_at: list[int] = []
    remove_file(run_dir / STATUS_FOLDER / REQUEST)
    while True:
        growth = Growth(run_dir, slots, current.config.run.ranks, lambda ranks: num_workers(resolved, ranks))
        try:
            with growth.looked_for() if checkpoint.elastic else contextlib.nullcontext():
                return launch(current, {**slots.environment, **spent})
        except (RankError, StoppedEarly) as stopped:
            saved = next(iter(list_checkpoints(run_dir / CHECKPOINTS)), 0)
            newest = max(saved, newest_copy(run_dir))
            if isinstance(stopped, StoppedEarly) and stopped.grows:
                text, num_before = growth.granted(), growth.num_left
                # Ranks that have saved to make room for more are progress: earlier losses do not count any more.
                lost_at = []
            else:
                error = _loss_in(stopped)
                if not checkpoint.elastic or error is None or not (error.lost or slots.gone()):
                    raise
                left_out, num_before = _left_out(slots, error, newest, resolved), current.config.run.ranks
                lost_at = [] if left_out else [*(step for step in lost_at if step == newest), newest]
                text = _lost(error, left_out, len(lost_at), newest)
                if num_workers(resolved, slots.num_ranks) < _least(resolved):
                    raise _too_few(text, resolved, slots, saved, error) from error
            before, current = shrink_config(current, num_before), _on(slots, resolved, current, run_dir)
            where = f"after step {newest}" if newest else "from the start"
            same = before.config.run.ranks == current.config.run.ranks
            text += f"; {'new ranks' if same else describe_change(before, current)} continue {where}"
        with contextlib.closing(FileJournal(run_dir)) as journal:
            journal.write("message", text=text)
        log(text)
        rundir.create(run_dir, _resumed(current), facts)  # new ranks read their settings from there
        if checkpoint.time_limit is not None:
            spent = {SPENT_VARIABLE: f"{time.monotonic() - began_s:.3f}"}


def _least(resolved: ResolvedConfig[Any]) -> int:
    """Return the smallest number of workers with which the run continues."""
    return resolved.config.checkpoint.min_workers or num_workers(resolved)


def _left_out(slots: RankSlots, error: RankError, newest: int, resolved: ResolvedConfig[Any]) -> str:
    """Exclude nodes or slots after a loss, and describe them."""
    return slots.leave_out(error, newest, lambda ranks: num_workers(resolved, ranks) >= _least(resolved))


def _lost(error: RankError, left_out: str, times: int, newest: int) -> str:
    """Describe the loss. Raises RankError if it happened TRIES times in a row."""
    if times == TRIES:
        text = f"{error}; lost {TRIES} times after step {newest}, the run does not restart by itself"
        raise RankError(text, rank=error.rank, host=error.host, exit_code=error.exit_code) from error
    what = f"node {error.node} went down or cannot be reached" if error.node else str(error)
    return "; ".join(filter(None, [what, left_out]))


def _loss_in(error: RankError | StoppedEarly) -> RankError | None:
    """Return `error` as the loss of a rank or node; None if the ranks were asked to stop for another reason.

    If the scheduler notices a lost node first, it signals the ranks, and some of them can save (StoppedEarly).
    """
    if isinstance(error, RankError):
        return error
    return RankError(str(error), host=error.node, lost=True, node=error.node) if error.node else None


def _too_few(text: str, resolved: ResolvedConfig[Any], slots: RankSlots, saved: int, error: RankError) -> Exception:
    """Return the error for too few workers: StoppedEarly (exit code 75) if a checkpoint exists, else RankError."""
    least, asked = _least(resolved), resolved.config.checkpoint.min_workers is not None
    few = f"{num_workers(resolved, slots.num_ranks) or 'no'} workers are left"
    text += f"; {few}, {f'--min-workers is {least}' if asked else f'without --min-workers all {least} are needed'}"
    if saved:
        return StoppedEarly(f"{text}; what is saved, up to step {saved}, is kept: continue with --resume")
    return RankError(f"{text}; nothing is saved yet", rank=error.rank, host=error.host)


def _on(slots: RankSlots, planned: ResolvedConfig[Any], now: ResolvedConfig[Any], run_dir: Path) -> ResolvedConfig[Any]:
    """Return the settings of the `planned` run on as many ranks as there are slots.

    Injected faults of ranks or hosts that no longer exist are dropped for good.
    """
    num_ranks = min(slots.num_ranks, planned.config.run.ranks)
    if num_ranks == now.config.run.ranks:
        return now
    resized = planned if num_ranks == planned.config.run.ranks else shrink_config(planned, num_ranks)
    left: list[str] = []
    for number, fault in enumerate(parse_faults(now.config.safety.inject, planned.config.run.ranks)):
        struck = run_dir / STATUS_FOLDER / f"{rundir.STRUCK}{number}"
        there = slots.num_nodes if fault.of_host else resized.config.run.ranks
        alone = there == 1 and fault.kind in NETWORK
        if alone or (fault.rank is not None and fault.rank >= there):
            remove_file(struck)
            continue
        if struck.exists():  # the file's name holds the position of the fault in the list
            move_over(struck, struck.with_name(f"{rundir.STRUCK}{len(left)}"))
        left.append(fault.text)
    return ResolvedConfig(config=replace(resized.config, inject=",".join(left)), origins=resized.origins)


def _resumed(resolved: ResolvedConfig[Any]) -> ResolvedConfig[Any]:
    return ResolvedConfig(config=replace(resolved.config, resume=True), origins=resolved.origins)
