"""The table of checks, and a run of all of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence

from hpcdl.core.errors import HpcdlError
from hpcdl.core.registry import Entry, Registry
from hpcdl.doctor.finding import Finding, Subject, failure

CHECKS = Registry(
    "check",
    {
        name: Entry(target=f"hpcdl.doctor.{module}:check", summary=summary)
        for name, module, summary in (
            ("python", "python", "Python, TensorFlow, Keras and the other packages, and that they go together"),
            ("module", "module", "the environment module and what it was built on"),
            ("config", "config", "site.toml, the user's settings, and whether they can be written"),
            ("mpi", "mpi", "which MPI is loaded, its mpiexec, and whether two ranks really talk"),
            ("scheduler", "scheduler", "the batch system and the PMI that the MPI needs from it"),
            ("affinity", "affinity", "the cores that this process may use, against the allocation"),
            ("threads", "threads", "threads times ranks against cores"),
            ("profile", "profile", "the tuned profile that would be used"),
            ("locking", "locking", "HDF5 and file locking"),
            ("storage", "storage", "file systems of the current and the data folder"),
            ("scratch", "scratch", "storage of the node's own"),
            ("shared-memory", "shared_memory", "space in /dev/shm"),
            ("limits", "limits", "open files, processes, memory"),
            ("clocks", "clocks", "clocks of the job's hosts"),
        )
    },
)


def examine(subject: Subject, names: Sequence[str] = (), told: Callable[[str], None] = lambda _: None) -> list[Finding]:
    """Run the checks called `names` (all by default); `told` hears each name before it begins."""
    return [finding for name in names or CHECKS for finding in _examine(name, subject, told)]


def _examine(name: str, subject: Subject, told: Callable[[str], None]) -> Iterator[Finding]:
    told(name)
    check: Callable[[Subject], list[Finding]] = CHECKS.load(name)
    try:
        yield from check(subject)
    except HpcdlError as error:
        yield failure(name, str(error).splitlines()[0], "see the message")
    except Exception as error:  # noqa: BLE001  one check that breaks must not hide what the others find
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"the check itself broke: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        yield failure(name, text, "please report this; the other checks went on")
