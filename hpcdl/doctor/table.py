"""The table of checks, their subject and their findings, and a function that runs them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpcdl.core.errors import HpcdlError
from hpcdl.core.registry import Entry, Registry

OK, WARNING, FAILURE = "ok", "warning", "failure"
"""failure: a run here will fail; warning: it will be slow, or may fail."""
CHECKS = Registry(
    "check",
    {
        name: Entry(target=f"hpcdl.doctor.{module}:check_{name.replace('-', '_')}", summary=summary)
        for name, module, summary in (
            ("python", "installation", "Python, TensorFlow, Keras and the other packages, and that they go together"),
            ("module", "installation", "the environment module and what it was built on"),
            ("config", "installation", "site.toml, the user's settings, and whether they can be written"),
            ("machine", "installation", "settings of the machine: variables set otherwise, modules that are missing"),
            ("mpi", "mpi", "which MPI is loaded, its mpiexec, and whether two ranks really talk"),
            ("scheduler", "scheduler", "the batch system and the PMI that the MPI needs from it"),
            ("affinity", "node", "the cores that this process may use, against the allocation"),
            ("threads", "node", "threads times ranks against cores"),
            ("gpus", "accelerators", "the node's GPUs, and whether TensorFlow sees them"),
            ("profile", "node", "the tuned profile that would be used"),
            ("locking", "storage", "HDF5 and file locking"),
            ("storage", "storage", "file systems of the current and the data folder"),
            ("scratch", "storage", "storage of the node's own"),
            ("shared-memory", "storage", "space in /dev/shm"),
            ("limits", "node", "open files, processes, memory"),
            ("clocks", "scheduler", "clocks of the job's hosts"),
        )
    },
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence on one result; if there is a problem, `remedy` says what to type or whom to ask.

    `check` is the name of the check; `examine` sets it.
    """

    check: str = ""
    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of the checks: an environment, the folders that a run would use, and roots of the kernel's files."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    data: Path | None = None
    working: Path = field(default_factory=Path.cwd)
    shared_memory: Path = Path("/dev/shm")
    control_groups: Path = Path("/sys/fs/cgroup")
    devices: Path = Path("/")
    """The root under which dev/ and sys/ list the node's devices."""
    model: str = ""

    @property
    def scratch(self) -> Path:
        """The node's own storage."""
        return Path(self.environment.get("HPCDL_NODE_STORAGE") or self.environment.get("TMPDIR") or "/tmp")

    @property
    def ranks_here(self) -> int:
        """The number of ranks that the job puts on a node, 1 outside any job."""
        text = self.environment.get("SLURM_NTASKS_PER_NODE", "1").split("(")[0]
        return int(text) if text.isdigit() else 1


def ok(text: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(level=OK, text=text)


def warning(text: str, remedy: str) -> Finding:
    """Return a finding about something that works with limits."""
    return Finding(level=WARNING, text=text, remedy=remedy)


def failure(text: str, remedy: str) -> Finding:
    """Return a finding about something that will not work."""
    return Finding(level=FAILURE, text=text, remedy=remedy)


def examine(
    subject: Subject, names: Sequence[str] = (), report: Callable[[str], None] = lambda _: None
) -> list[Finding]:
    """Run the checks called `names` (all by default); `report` receives each name before its check."""
    return [replace(finding, check=name) for name in names or CHECKS for finding in _examine(name, subject, report)]


def _examine(name: str, subject: Subject, report: Callable[[str], None]) -> Iterator[Finding]:
    report(name)
    check: Callable[[Subject], list[Finding]] = CHECKS.load(name)
    try:
        yield from check(subject)
    except HpcdlError as error:
        yield failure(str(error).splitlines()[0], "see the message")
    except Exception as error:  # noqa: BLE001  one check that breaks must not hide what the others find
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"the check itself broke: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        yield failure(text, "please report this; the other checks continued")
