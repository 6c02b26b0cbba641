"""The mpiexec that belongs to the MPI library of mpi4py, and the options that each MPI family needs.

The first mpiexec on PATH is often another MPI's: it then starts N jobs of one rank instead of one job of N. So the
library is determined first, without starting MPI, and its mpiexec is searched for beside it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import UsageError
from hpcdl.core.paths import own_program

REMEDY = "pip install 'hpcdl[mpich]' or load the site's MPI module"
TIMEOUT_S = 120.0
"""Time limit for loading a library from a cold parallel file system."""

_LIBRARIES = (
    ("openmpi", re.compile(r"Open MPI v?(\d+(?:\.\d+)*)")),
    ("intel", re.compile(r"Intel\(R\) MPI Library (\d+(?:\.\d+)*)")),
    ("mvapich", re.compile(r"MVAPICH\w* Version\s*:\s*(\d+(?:\.\d+)*)")),
    ("cray", re.compile(r"CRAY MPICH version (\d+(?:\.\d+)*)")),
    ("mpich", re.compile(r"MPICH Version:\s*(\d+(?:\.\d+)*)")),
)
"""Flavours by the text of MPI_Get_library_version; the first match counts."""
_LAUNCHERS = (
    ("openmpi", re.compile(r"\((?:OpenRTE|Open MPI)\) (\d+(?:\.\d+)*)")),
    ("intel", re.compile(r"Intel\(R\) MPI Library for Linux\* OS, Version (\d+(?:\.\d+)*)")),
    ("mpich", re.compile(r"HYDRA build details:\s*Version:\s*(\d+(?:\.\d+)*)")),
)
"""Flavours by the output of `mpiexec --version`."""
_NAMES = {
    "openmpi": ("mpiexec.openmpi", "mpiexec", "orterun", "prterun"),
    "mpich": ("mpiexec.hydra", "mpiexec.mpich", "mpiexec"),
    "intel": ("mpiexec.hydra", "mpiexec"),
    "mvapich": ("mpiexec.hydra", "mpiexec"),
    "cray": ("mpiexec",),
}
_SPEAKS = {"mvapich": "mpich", "cray": "mpich"}
"""Flavours whose mpiexec reports another flavour's name."""

CONTINUES = ("--with-ft", "ulfm")
"""Options of Open MPI's mpiexec, from version 5 on, that let ranks continue when one dies."""

_LOCAL = {
    "openmpi": ("--mca", "plm", "isolated", "--mca", "ras", "^slurm,tm,alps,gridengine,lsf,loadleveler"),
    "mpich": ("-rmk", "user", "-launcher", "fork"),
    "intel": ("-rmk", "user", "-launcher", "fork"),
    "mvapich": ("-rmk", "user", "-launcher", "fork"),
}
_SHARED_MEMORY, _SEGMENT_BYTES = "/dev/shm", 32 << 20
"""The place where Open MPI's ranks meet on a node, and several times the space that each of them uses there."""


@dataclass(frozen=True, kw_only=True)
class Mpiexec:
    """A launcher, and the library that it belongs to."""

    path: Path
    flavour: str
    library: Path
    version: str


def find_mpiexec(python: str = sys.executable) -> Mpiexec:
    """Return the mpiexec of the library that mpi4py loads in `python`. Raises UsageError with the remedy without one.

    MPI4PY_LIBMPI and MPI4PY_MPIABI count as they do in mpi4py. An mpiexec beside the library (in `bin` of one of
    the folders above it) is accepted if it is of the library's flavour; one on PATH only if its version agrees too.
    """
    library, flavour, version = find_library(python)
    for candidate in _beside(library, flavour):
        if launcher_of(candidate)[0] == _SPEAKS.get(flavour, flavour):
            return Mpiexec(path=candidate, flavour=flavour, library=library, version=version)
    for candidate in _on_path(flavour):
        if launcher_of(candidate) == (_SPEAKS.get(flavour, flavour), version):
            return Mpiexec(path=candidate, flavour=flavour, library=library, version=version)
    raise UsageError(f"no mpiexec belongs to {library} ({flavour} {version}); {REMEDY}")


def find_library(python: str = sys.executable) -> tuple[Path, str, str]:
    """Return file, flavour and version of the MPI library of mpi4py in `python`. Raises UsageError if there is none."""
    library, text = _ask_library(python)
    flavour, version = _recognise(text, _LIBRARIES)
    if not flavour:
        raise UsageError(f"{library} is an MPI that hpcdl does not know ({text.splitlines()[0][:80]}); {REMEDY}")
    return library, flavour, version


def mpi_flavour(python: str = sys.executable) -> str:
    """Return the flavour of the MPI library that mpi4py loads in `python`; its mpiexec need not exist."""
    return find_library(python)[1]


def environment_for(flavour: str) -> Mapping[str, str]:
    """Return the environment that ranks need under this MPI.

    Open MPI: a waiting rank yields its core to its own back-propagation; hpcdl binds, not mpiexec; more ranks than
    cores may start (a laptop); root may start them (a container). MPICH and its kin do all of that by default.
    """
    if flavour != "openmpi":
        return {}
    settings = {
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return settings


def kept_on_node(flavour: str, num_ranks: int, environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that keep ranks on one node from listening on its network; none that the user has set.

    MPICH from PyPI (UCX): use only the loopback. Open MPI: use only shared memory, if there is enough space.
    """
    if flavour == "mpich" and not {"UCX_NET_DEVICES", "UCX_TLS"} & environment.keys():
        return {"UCX_NET_DEVICES": "lo"}
    if flavour == "openmpi" and not _chooses_btl(environment) and _has_shared_memory(num_ranks):
        return {"OMPI_MCA_btl": "^tcp,ofi"}  # libfabric listens on the node's address too
    return {}


def _chooses_btl(environment: Mapping[str, str]) -> bool:
    """Return whether the user has chosen Open MPI's transport between ranks."""
    if any(name.startswith("OMPI_MCA_btl") for name in environment):
        return True
    user_file = Path(environment.get("HOME", "/")) / ".openmpi" / "mca-params.conf"
    try:
        return re.search(r"^\s*btl\w*\s*=", user_file.read_text(errors="replace"), re.MULTILINE) is not None
    except OSError:
        return False


def _has_shared_memory(num_ranks: int) -> bool:
    try:
        volume = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return False
    return os.access(_SHARED_MEMORY, os.W_OK) and volume.f_bavail * volume.f_frsize >= num_ranks * _SEGMENT_BYTES


def launch_flags(flavour: str) -> Sequence[str]:
    """Return the options of mpiexec for ranks on this node only, also inside a scheduler's job of several nodes."""
    return _LOCAL.get(flavour, ())


def _ask_library(python: str) -> tuple[Path, str]:
    """Return file and version text of the MPI library from a new process: loading it here would be permanent."""
    try:
        answer = subprocess.run(
            own_program("hpcdl.comm.mpi.library", python=python),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        document = json.loads(answer.stdout.strip().splitlines()[-1])  # libraries may print before it
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UsageError(f"the MPI library cannot be loaded ({_last_line(error)}); {REMEDY}") from error
    if "error" in document:
        raise UsageError(document["error"])
    return Path(document["library"]), document["version"]


def _last_line(error: Exception) -> str:
    output = (getattr(error, "stderr", "") or "").strip()
    return output.splitlines()[-1] if output else str(error)


def _recognise(text: str, known: tuple[tuple[str, re.Pattern[str]], ...]) -> tuple[str, str]:
    for flavour, pattern in known:
        match = pattern.search(text)
        if match:
            return flavour, match[1]
    return "", ""


def _beside(library: Path, flavour: str) -> Iterator[Path]:
    """Yield launchers in `bin` of the folders above the library, as named and as resolved, nearest first."""
    seen = set()
    for start in (library, library.resolve()):
        for folder in list(start.parents)[:-1]:
            for name in _NAMES[flavour]:
                candidate = folder / "bin" / name
                if candidate not in seen and os.access(candidate, os.X_OK):
                    yield candidate
                seen.add(candidate)


def _on_path(flavour: str) -> Iterator[Path]:
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for name in _NAMES[flavour]:
            program = shutil.which(name, path=folder) if folder else None
            if program:
                yield Path(program)


def launcher_of(mpiexec: Path) -> tuple[str, str]:
    """Return the flavour and version that an mpiexec reports; empty if they are unknown."""
    try:
        answer = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):
        return "", ""
    return _recognise(answer.stdout + answer.stderr, _LAUNCHERS)
