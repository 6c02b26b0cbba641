"""This process among the ranks of a user's script: `init`, `shutdown`, and its ranks and sizes.

This module keeps one communicator for the process, as MPI does; all other modules of hpcdl are given theirs.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.core.errors import UsageError
from hpcdl.core.paths import check_backend
from hpcdl.core.storage.disk import remove_folder
from hpcdl.scripts.process.downloads import download_once
from hpcdl.scripts.process.evaluations import Evaluations
from hpcdl.scripts.process.exit import ProcessEnd
from hpcdl.scripts.process.undistributed import differing_variables, watch_training
from hpcdl.scripts.process.written import of_unequal_saves

if TYPE_CHECKING:
    from hpcdl.cluster.environment import Placement
    from hpcdl.comm.observed import Observed
    from hpcdl.scripts.process.group import ScriptGroup
    from hpcdl.scripts.process.measure import ScriptRun
    from hpcdl.supervision.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class Session:
    """What `init` creates. `hosts`: the name of every rank's node, in rank order.

    `folder`: a folder for notes between ranks, None for one rank. `process_end` is None for a single rank and under
    `hpcdl run`, which handles the end itself; `run` is None without it.
    """

    communicator: Observed
    group: ScriptGroup
    hosts: Sequence[str]
    folder: Path | None = None
    process_end: ProcessEnd | None = None
    run: ScriptRun | None = None
    evaluations: Evaluations = field(default_factory=Evaluations)
    saves: dict[str, int] = field(default_factory=dict)
    """How often this rank was about to save to each path outside `fit`, which ranks that decide alike do together."""
    last_looks: list[Callable[[], str]] = field(default_factory=list)
    """Functions that return a warning when the script is over, or nothing."""

    def last_warnings(self, communicator: Observed) -> list[str]:
        """Return what to warn of once every rank's script is over. Collective."""
        texts = [of_unequal_saves(self.saves, communicator), *(look() for look in self.last_looks)]
        return [*self.evaluations.warnings(communicator), *differing_variables(communicator), *filter(None, texts)]


_sessions: list[Session] = []
_launched: list[Session] = []
"""The session that `hpcdl run` created before the script began."""
_helpers: list[Placement] = []
"""The placement of the rank that forked this process or started it by multiprocessing. The process is not a rank."""
_forks: list[Placement] = []
"""The placement of this process, once its forks have been set up."""


def init(stall_timeout_s: float = 300.0) -> None:
    """Join the ranks of the launcher, or be the only rank if there is none. Call it at the top of the script.

    From then on a rank ends the job, with one line about it, if it waits `stall_timeout_s` seconds for a rank that is
    gone, stopped or in another operation (under `hpcdl run`: --stall-timeout). A second call changes nothing.

    A process that a rank forks, or starts by multiprocessing, may import the script again, with this call at its top.
    It is not a rank: rank, size, local_rank and local_size are its parent's, and everything else is refused.
    """
    from hpcdl.cluster.environment import placement
    from hpcdl.rank.start import ALONE, join
    from hpcdl.scripts.process.group import ScriptGroup

    if is_initialized():
        return
    # While a new process imports the script, only its name shows that it is not the first one.
    if multiprocessing.current_process().name != "MainProcess" and (parent := placement()) is not None:
        _helpers.append(parent)
        return
    check_backend()
    if _launched:
        _sessions.append(_launched[0])
        return
    process = placement() or ALONE
    joined = join(process)
    process_end, folder = None, None
    if process.size > 1:
        process_end = ProcessEnd(
            communicator=joined,
            last=joined.duplicate(),
            watch=_watched(joined, stall_timeout_s),
            warnings=lambda last: here.last_warnings(last),
        )
        folder = process_end.watch.folder
        process_end.install()
    hosts = joined.allgather_json(joined.host)
    group = ScriptGroup(joined)
    _settle_forks(process)
    watch_training(process.size, functools.partial(_warn, joined.rank), is_initialized, under_run=False)
    download_once(joined, folder, lambda: not _helpers)
    here = Session(communicator=joined, group=group, hosts=hosts, folder=folder, process_end=process_end)
    _sessions.append(here)


SAME_SAMPLES = "the same samples"
"""Key of the warning that ranks have the same samples, which is given once, however that was noticed."""
DIFFERENT_SAMPLES = (
    "hpcdl.dataset or x[hpcdl.rank() :: hpcdl.size()]; random inputs, such as noise, with "
    "keras.utils.set_random_seed(1 + hpcdl.rank())"
)
"""How to give ranks different samples."""


def warn_once(group: ScriptGroup, key: str, text: str) -> None:
    """Print a warning on the group's rank 0 and note it in the run's record, the first time that `key` is given."""

    def warn() -> bool:
        if group.rank == 0:
            sys.stderr.write(f"hpcdl: warning: {text}\n")
        if (run := session().run) is not None:
            run.warnings.append(text)
        return True

    group.keep(key, warn)


def adopt(session: Session) -> None:
    """Make `init` return this session, which `hpcdl run` created."""
    from hpcdl.cluster.environment import placement
    from hpcdl.rank.start import ALONE

    _launched.append(session)
    _settle_forks(placement() or ALONE)
    former = session.communicator

    def warn(text: str) -> None:
        _warn(former.rank, text)
        if session.run is not None:
            session.run.warnings.append(text)

    watch_training(former.size, warn, is_initialized, under_run=True)
    download_once(former, session.folder, lambda: not _helpers)


def _settle_forks(process: Placement) -> None:
    """Ensure that later forks are not ranks and that SIGTERM ends them: multiprocessing ends its processes by it."""
    if not _forks:
        os.register_at_fork(after_in_child=_begin_as_fork)
    # A hook at forks cannot be removed: it is set once, and finds here what counts now.
    _forks[:] = [process]


def _begin_as_fork() -> None:
    # A rank's reaction to a signal (save, report that it was stopped) must not run in a process that loads its data.
    if str(getattr(signal.getsignal(signal.SIGTERM), "__module__", "")).startswith("hpcdl."):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    process = _forks[0]
    if process.size > 1 and not _helpers:
        _helpers.append(process)


def is_rank() -> bool:
    """Return whether this process may exchange: `init` has been called, and no rank has started the process."""
    return bool(_sessions) and not _helpers


def _warn(rank: int, text: str) -> None:
    """Print one warning on rank 0."""
    if rank == 0:
        sys.stderr.write(f"hpcdl: warning: {text}\n")


def shutdown() -> None:
    """Leave together: return when every rank has called it. `init` may follow. Do nothing without a session."""
    if not _sessions:
        return
    ended = _sessions[0]
    ended.group.agree("hpcdl.shutdown")
    _sessions.clear()
    if ended.process_end is not None:
        ended.process_end.uninstall()
        ended.process_end.watch.stop()


def is_initialized() -> bool:
    """Return whether `init` has been called without a `shutdown` after it."""
    return bool(_sessions or _helpers)


def _watched(joined: Observed, stall_timeout_s: float) -> Watchdog:
    """Watch this rank until the script is over. The ranks leave their notes in a folder of the user's cache."""
    from hpcdl.comm.agree import decided
    from hpcdl.core.paths import user_cache_folder
    from hpcdl.supervision.watchdog import FOLDER, Limits, watchdog_of

    folder = Path(decided(joined, lambda: str(user_cache_folder() / FOLDER / uuid.uuid4().hex)))
    joined.monitor.role = "script"
    joined.monitor.doing("running the script")
    watch = watchdog_of(joined, folder)
    watch.limits = Limits(stall_s=stall_timeout_s)
    watch.hosts = dict(enumerate(joined.allgather_json(joined.host)))
    watch.start()
    atexit.register(remove_folder, folder, ".+")  # the name is unique to this start
    return watch


def session() -> Session:
    """Return what `init` created. Raises UsageError before it, and in a process that is not a rank."""
    if _helpers:
        raise UsageError(
            "this process is no rank, but one that a rank has started: ranks alone may exchange; move what "
            "they do behind `if __name__ == '__main__':`"
        )
    if not _sessions:
        raise UsageError("hpcdl.init() has not been called; call it at the top of the script")
    return _sessions[0]


def note_strategy(name: str) -> None:
    """Add the strategy `name` to the run's record, if there is a run."""
    run = session().run
    if run is not None and name not in run.strategies:
        run.strategies.append(name)


def note_settings(settings: Mapping[str, Any]) -> None:
    """Add settings of the script's exchanges, under the names of `hpcdl train`, to the run's record."""
    run = session().run
    if run is not None:
        run.settings |= {name.replace("_", "-"): value for name, value in settings.items()}


def communicator() -> Observed:
    """Return the communicator of all ranks. Raises UsageError before `init`."""
    return session().communicator


def rank() -> int:
    """Return this process's number, 0 to size() - 1."""
    return _helpers[0].rank if _helpers else communicator().rank


def size() -> int:
    """Return the number of processes."""
    return _helpers[0].size if _helpers else communicator().size


def local_rank() -> int:
    """Return this process's number among those on its node, in rank order: 0 to local_size() - 1."""
    if _helpers:
        return _helpers[0].local_rank
    here = session()
    return here.hosts[: here.communicator.rank].count(here.communicator.host)


def local_size() -> int:
    """Return the number of processes on this node."""
    if _helpers:
        return _helpers[0].local_size
    here = session()
    return here.hosts.count(here.communicator.host)


def node_rank() -> int:
    """Return this node's number, 0 for that of rank 0: nodes are numbered in the order of their first ranks."""
    here = session()
    return list(dict.fromkeys(here.hosts)).index(here.communicator.host)
