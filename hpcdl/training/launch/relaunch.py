"""A run that goes on by itself, `--elastic`: where ranks are lost, new ones start from the newest checkpoint.

They start on the nodes that are left. Where those hold fewer workers, the run goes on with these (fewer.py), down to
`--min-workers`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.launchers.base import LEFT_OUT_VARIABLE, Launcher, ranks_per_node
from hpcdl.cluster.status import FOLDER as STATUS_FOLDER
from hpcdl.cluster.status import same_host
from hpcdl.config.load import Effective, replace
from hpcdl.core.errors import RankError, StoppedEarly, UsageError
from hpcdl.training.checkpoint.folders import FOLDER, list_checkpoints
from hpcdl.training.checkpoint.local import newest_copy
from hpcdl.training.launch import rundir
from hpcdl.training.launch.fewer import num_workers, told, with_fewer
from hpcdl.training.loop.journal import FileJournal
from hpcdl.training.session.faults import NETWORK, parse_faults

TRIES = 3
"""Starts in a row that may be lost without a new checkpoint between them."""


def check_starts_ranks(elastic: bool, launcher: str) -> None:
    """UsageError where ranks are started by somebody else, who alone could start new ones."""
    if elastic:
        raise UsageError(
            f"--elastic: {launcher} has started the ranks, and new ones are its own to start; "
            "leave the start to hpcdl (--ranks N), or --elastic out"
        )


class Places:
    """Where a run's ranks may be started: the nodes of its job but for those left out, as many on each as at first.

    Without nodes (this one alone): as many as there were, but for those that were lost again and again.
    """

    def __init__(self, launcher: Launcher, num_ranks: int) -> None:
        self._launcher = launcher
        hosts = launcher.hosts(os.environ)
        self._nodes = hosts if len(hosts) > 1 else []
        self._per_node = ranks_per_node(hosts, num_ranks)
        self._num_alone = num_ranks
        self._failures: Counter[object] = Counter()
        self._left_out: list[str] = []

    @property
    def num_ranks(self) -> int:
        """Ranks that may be started."""
        left = len(self._nodes) - len(self._left_out)
        return left * self._per_node if self._nodes else self._num_alone

    @property
    def num_nodes(self) -> int:
        """Nodes that ranks may be started on."""
        return len(self._nodes) - len(self._left_out) if self._nodes else 1

    @property
    def environment(self) -> dict[str, str]:
        """What tells the launcher which nodes to leave out."""
        return {LEFT_OUT_VARIABLE: ",".join(self._left_out)} if self._left_out else {}

    def gone(self, named: str = "") -> list[str]:
        """The nodes in use that the scheduler knows to be gone, and the one that is `named`."""
        if not self._nodes:
            return []
        gone = {*self._launcher.lost_hosts({**os.environ, **self.environment}), named}
        here = [node for node in self._nodes if node not in self._left_out]
        return [node for node in here if any(same_host(node, name) for name in gone)]

    def _leave_out_evicted(self, error: RankError, enough: Callable[[int], bool]) -> str:
        """Of a rank that is too slow: its place, and where there are several nodes its node, as long as others do."""
        if not enough(self.num_ranks - (self._per_node if self._nodes else 1)):
            return ""
        if not self._nodes:
            self._num_alone -= 1
            return f"the place of rank {error.rank} is left out"
        found = [node for node in self._nodes if node not in self._left_out and same_host(node, error.host)]
        self._left_out += found
        return f"{found[0]} is left out" if found else ""

    def leave_out(self, error: RankError, newest: int, enough: Callable[[int], bool]) -> str:
        """What is left out from now on, in words; nothing where all may go on as it was.

        A node that is gone is left out, and one on which ranks have been lost twice; without nodes a rank's place, if
        it was lost twice after the same checkpoint, `newest`. What may come back stays where there would not be
        `enough` ranks without it.
        """
        if error.evicted:
            return self._leave_out_evicted(error, enough)
        if not self._nodes:
            self._failures[newest, error.rank] += 1
            if self._failures[newest, error.rank] < 2 or not enough(self.num_ranks - 1):
                return ""
            self._num_alone -= 1
            return f"the place of rank {error.rank}, lost twice, is left out"
        if lost := self.gone(error.node):
            self._left_out += lost
            return f"{' and '.join(lost)} {'is' if len(lost) == 1 else 'are'} left out"
        for node in (node for node in self._nodes if node not in self._left_out):
            self._failures[node] += same_host(node, error.host)
            if same_host(node, error.host) and self._failures[node] > 1 and enough(self.num_ranks - self._per_node):
                self._left_out.append(node)
                return f"{node}, on which ranks were lost twice, is left out"
        return ""


def until_done(
    launch: Callable[[Effective[Any], Mapping[str, str]], None],
    run_dir: Path,
    effective: Effective[Any],
    facts: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Call `launch` until it returns; RankError where a rank fails by its own doing, or none of TRIES gets anywhere.

    `launch` gets the run's settings, and what the launcher needs in its environment. Between two launches the journal
    and `say` are told, and run.toml says that the run is resumed, on how many ranks. StoppedEarly where fewer workers
    are left than --min-workers. Without --elastic `launch` is called once.
    """
    checkpoint, now = effective.config.checkpoint, effective
    least = checkpoint.min_workers or num_workers(effective)
    places = Places(find_launcher(), effective.config.run.ranks)
    lost_at: list[int] = []
    while True:
        try:
            return launch(now, places.environment)
        except (RankError, StoppedEarly) as stopped:
            error = _loss_in(stopped)
            if not checkpoint.elastic or error is None or not (error.lost or places.gone()):
                raise
            saved = next(iter(list_checkpoints(run_dir / FOLDER)), 0)
            newest = max(saved, newest_copy(run_dir))
            left_out = places.leave_out(error, newest, lambda ranks: num_workers(effective, ranks) >= least)
            lost_at = [] if left_out else [*(step for step in lost_at if step == newest), newest]
            if len(lost_at) == TRIES:
                text = f"{error}; lost {TRIES} times after step {newest}, the run does not go on by itself"
                raise RankError(text, rank=error.rank, host=error.host, exit_code=error.exit_code) from error
            what = f"node {error.node} went down or cannot be reached" if error.node else str(error)
            text = "; ".join(filter(None, [what, left_out]))
            fitting = min(places.num_ranks, now.config.run.ranks)
            if num_workers(effective, fitting) < least:
                few = f"{num_workers(effective, fitting) or 'no'} workers are left"
                asked = checkpoint.min_workers is not None
                why = f"--min-workers is {least}" if asked else f"without --min-workers all {least} are needed"
                raise _too_few(f"{text}; {few}, {why}", saved, error) from error
            before, now = now, _on(fitting, places.num_nodes, now, run_dir)
            where = f"after step {newest}" if newest else "from the start"
            text += f"; {'new ranks' if before is now else told(before, now)} go on {where}"
        with contextlib.closing(FileJournal(run_dir)) as journal:
            journal.write("message", text=text)
        say(text)
        rundir.create(run_dir, _resumed(now), facts)


def _loss_in(error: RankError | StoppedEarly) -> RankError | None:
    """`error` as what a rank or node that is lost amounts to; None for ranks that were told to stop for another reason.

    Where the scheduler notices first that a node is gone, it tells the ranks, and some can save.
    """
    if isinstance(error, RankError):
        return error
    return RankError(str(error), host=error.node, lost=True, node=error.node) if error.node else None


def _too_few(text: str, saved: int, error: RankError) -> Exception:
    """What ends a run that has not got enough workers: 75 where there is something to resume."""
    if saved:
        return StoppedEarly(f"{text}; what is saved, up to step {saved}, is kept: go on with --resume")
    return RankError(f"{text}; nothing is saved yet", rank=error.rank, host=error.host)


def _on(num_ranks: int, num_nodes: int, effective: Effective[Any], run_dir: Path) -> Effective[Any]:
    """The settings of a run that goes on on at most `num_ranks`; faults of what is no more there are left out."""
    if num_ranks == effective.config.run.ranks:
        return effective
    fewer = with_fewer(effective, num_ranks)
    left: list[str] = []
    for number, fault in enumerate(parse_faults(effective.config.safety.inject, effective.config.run.ranks)):
        struck = run_dir / STATUS_FOLDER / f"{rundir.STRUCK}{number}"
        there = num_nodes if fault.of_host else fewer.config.run.ranks
        alone = there == 1 and fault.kind in NETWORK
        if alone or (fault.rank is not None and fault.rank >= there):
            struck.unlink(missing_ok=True)
            continue
        if struck.exists():  # it counts faults from the first
            struck.rename(struck.with_name(f"{rundir.STRUCK}{len(left)}"))
        left.append(fault.text)
    return Effective(config=replace(fewer.config, inject=",".join(left)), origins=fewer.origins)


def _resumed(effective: Effective[Any]) -> Effective[Any]:
    return Effective(config=replace(effective.config, resume=True), origins=effective.origins)
