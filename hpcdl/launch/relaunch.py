"""A run that goes on by itself, `--elastic`: where ranks are lost, new ones start from the newest checkpoint.

They start on the nodes that are left (places.py). Where those hold fewer workers, the run goes on with these
(fewer.py), down to `--min-workers`, until there can be more again (grow.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcdl.checkpoint.folders import FOLDER, list_checkpoints
from hpcdl.checkpoint.memory import newest_copy
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.status import FOLDER as STATUS_FOLDER
from hpcdl.config.load import ResolvedConfig, replace
from hpcdl.core.errors import RankError, StoppedEarly, UsageError
from hpcdl.core.storage.disk import move_over, remove_file
from hpcdl.launch.grow import REQUEST, Growth
from hpcdl.launch.slots import RankSlots
from hpcdl.run import rundir
from hpcdl.run.faults import NETWORK, parse_faults
from hpcdl.run.journal import FileJournal
from hpcdl.run.shrink import describe_change, num_workers, shrink_config
from hpcdl.supervision.control import SPENT_VARIABLE

TRIES = 3
"""Starts in a row that may be lost without a new checkpoint between them."""


def check_starts_ranks(elastic: bool, launcher: str) -> None:
    """UsageError where ranks are started by somebody else, who alone could start new ones."""
    if elastic:
        raise UsageError(
            f"--elastic: {launcher} has started the ranks, and new ones are its own to start; "
            "leave the start to hpcdl (--ranks N), or --elastic out"
        )


def until_done(
    launch: Callable[[ResolvedConfig[Any], Mapping[str, str]], None],
    run_dir: Path,
    resolved: ResolvedConfig[Any],
    facts: Mapping[str, Any],
    log: Callable[[str], None],
) -> None:
    """Call `launch` until it returns; RankError where a rank fails by its own doing, or none of TRIES gets anywhere.

    `launch` gets the run's settings, and what the launcher needs in its environment. Between two launches a line goes
    to the journal and to `log`, and run.toml gets the new number of ranks. StoppedEarly where fewer workers
    are left than --min-workers. Without --elastic `launch` is called once.
    """
    checkpoint, now = resolved.config.checkpoint, resolved
    places = RankSlots(find_launcher(), resolved.config.run.ranks)
    began_s = time.monotonic()
    spent: dict[str, str] = {}
    lost_at: list[int] = []
    remove_file(run_dir / STATUS_FOLDER / REQUEST)
    while True:
        growth = Growth(run_dir, places, now.config.run.ranks, lambda ranks: num_workers(resolved, ranks))
        try:
            with growth.looked_for() if checkpoint.elastic else contextlib.nullcontext():
                return launch(now, {**places.environment, **spent})
        except (RankError, StoppedEarly) as stopped:
            saved = next(iter(list_checkpoints(run_dir / FOLDER)), 0)
            newest = max(saved, newest_copy(run_dir))
            if isinstance(stopped, StoppedEarly) and stopped.grows:
                text, num_before = growth.granted(), growth.num_left
                lost_at = []
            else:
                error = _loss_in(stopped)
                if not checkpoint.elastic or error is None or not (error.lost or places.gone()):
                    raise
                left_out, num_before = _left_out(places, error, newest, resolved), now.config.run.ranks
                lost_at = [] if left_out else [*(step for step in lost_at if step == newest), newest]
                text = _lost(error, left_out, len(lost_at), newest)
                if num_workers(resolved, places.num_ranks) < _least(resolved):
                    raise _too_few(text, resolved, places, saved, error) from error
            before, now = shrink_config(now, num_before), _on(places, resolved, now, run_dir)
            where = f"after step {newest}" if newest else "from the start"
            same = before.config.run.ranks == now.config.run.ranks
            text += f"; {'new ranks' if same else describe_change(before, now)} go on {where}"
        with contextlib.closing(FileJournal(run_dir)) as journal:
            journal.write("message", text=text)
        log(text)
        rundir.create(run_dir, _resumed(now), facts)
        if checkpoint.time_limit is not None:
            spent = {SPENT_VARIABLE: f"{time.monotonic() - began_s:.3f}"}


def _least(resolved: ResolvedConfig[Any]) -> int:
    """With how few workers the run goes on."""
    return resolved.config.checkpoint.min_workers or num_workers(resolved)


def _left_out(places: RankSlots, error: RankError, newest: int, resolved: ResolvedConfig[Any]) -> str:
    """What is left out after a loss, in words."""
    return places.leave_out(error, newest, lambda ranks: num_workers(resolved, ranks) >= _least(resolved))


def _lost(error: RankError, left_out: str, times: int, newest: int) -> str:
    """What was lost, in words; RankError where that came TRIES times in a row."""
    if times == TRIES:
        text = f"{error}; lost {TRIES} times after step {newest}, the run does not restart by itself"
        raise RankError(text, rank=error.rank, host=error.host, exit_code=error.exit_code) from error
    what = f"node {error.node} went down or cannot be reached" if error.node else str(error)
    return "; ".join(filter(None, [what, left_out]))


def _loss_in(error: RankError | StoppedEarly) -> RankError | None:
    """`error` as what a rank or node that is lost amounts to; None for ranks that were told to stop for another reason.

    Where the scheduler notices first that a node is gone, it tells the ranks, and some can save.
    """
    if isinstance(error, RankError):
        return error
    return RankError(str(error), host=error.node, lost=True, node=error.node) if error.node else None


def _too_few(text: str, resolved: ResolvedConfig[Any], places: RankSlots, saved: int, error: RankError) -> Exception:
    """What ends a run that has not got enough workers: 75 where there is something to resume."""
    least, asked = _least(resolved), resolved.config.checkpoint.min_workers is not None
    few = f"{num_workers(resolved, places.num_ranks) or 'no'} workers are left"
    text += f"; {few}, {f'--min-workers is {least}' if asked else f'without --min-workers all {least} are needed'}"
    if saved:
        return StoppedEarly(f"{text}; what is saved, up to step {saved}, is kept: continue with --resume")
    return RankError(f"{text}; nothing is saved yet", rank=error.rank, host=error.host)


def _on(
    places: RankSlots, planned: ResolvedConfig[Any], now: ResolvedConfig[Any], run_dir: Path
) -> ResolvedConfig[Any]:
    """The settings with which a run that was `planned` goes on on as many ranks as there are places.

    Faults of what is no more there are left out, and do not come back.
    """
    num_ranks = min(places.num_ranks, planned.config.run.ranks)
    if num_ranks == now.config.run.ranks:
        return now
    resized = planned if num_ranks == planned.config.run.ranks else shrink_config(planned, num_ranks)
    left: list[str] = []
    for number, fault in enumerate(parse_faults(now.config.safety.inject, planned.config.run.ranks)):
        struck = run_dir / STATUS_FOLDER / f"{rundir.STRUCK}{number}"
        there = places.num_nodes if fault.of_host else resized.config.run.ranks
        alone = there == 1 and fault.kind in NETWORK
        if alone or (fault.rank is not None and fault.rank >= there):
            remove_file(struck)
            continue
        if struck.exists():  # it counts faults from the first
            move_over(struck, struck.with_name(f"{rundir.STRUCK}{len(left)}"))
        left.append(fault.text)
    return ResolvedConfig(config=replace(resized.config, inject=",".join(left)), origins=resized.origins)


def _resumed(resolved: ResolvedConfig[Any]) -> ResolvedConfig[Any]:
    return ResolvedConfig(config=replace(resolved.config, resume=True), origins=resolved.origins)
