"""The loaded MPI: does its mpiexec belong to it, and can two ranks communicate.

`mpiexec -n 2 python -m hpcdl.doctor.mpi` starts those two ranks.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcdl.cluster.launchers.mpiexec import (
    REMEDY,
    Mpiexec,
    environment_for,
    find_library,
    find_mpiexec,
    launch_flags,
    launcher_of,
)
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.paths import own_program
from hpcdl.doctor.table import Finding, Subject, failure, ok, warning

TIMEOUT_S = 40.0
_WITHOUT_WINDOWS = re.compile(r"^[1-4]\.")
_PROGRESS = "MPIR_CVAR_ASYNC_PROGRESS"
_IN_A_JOB = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "HYDRA_")


def check_mpi(subject: Subject) -> list[Finding]:
    """Check library, mpiexec, the first mpiexec on PATH, two ranks, and known weaknesses of the version."""
    try:
        library, flavour, version = find_library()
    except UsageError as error:
        return [failure(str(error), REMEDY)]
    findings = [ok(f"{flavour} {version}, {library}")]
    try:
        mpiexec = find_mpiexec()
    except UsageError as error:
        if subject.environment.get("SLURM_JOB_ID"):  # srun starts the ranks
            return [*findings, warning(str(error), "outside a Slurm job no ranks can be started here")]
        return [*findings, failure(str(error), REMEDY)]
    return [
        *findings,
        *_first_on_path(subject, mpiexec),
        _two_ranks(mpiexec),
        *_one_sided(mpiexec, subject.environment),
    ]


def _first_on_path(subject: Subject, mpiexec: Mpiexec) -> list[Finding]:
    on_path = shutil.which("mpiexec", path=subject.environment.get("PATH", os.defpath))
    if on_path is None or Path(on_path).resolve() == mpiexec.path.resolve():
        return []
    flavour, version = launcher_of(Path(on_path))
    if (flavour, version) in ((mpiexec.flavour, mpiexec.version), ("", "")):
        return []
    text = (
        f"mpiexec on PATH ({on_path}, {flavour} {version}) does not belong to the MPI that mpi4py loads "
        f"({mpiexec.flavour} {mpiexec.version}): by hand it starts N jobs of one rank"
    )
    return [warning(text, f"use `hpcdl train --ranks N`, or {mpiexec.path}")]


def _two_ranks(mpiexec: Mpiexec) -> Finding:
    """Start two ranks in a separate job, and check size, sum over both, and the thread level."""
    # With the present job's variables the two would take themselves for its ranks.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_IN_A_JOB)}
    line = [
        str(mpiexec.path),
        *launch_flags(mpiexec.flavour),
        "-n",
        "2",
        *own_program("hpcdl.doctor.mpi"),
    ]
    remedy = f"run it by hand to see more: {' '.join(line)}"
    try:
        done = subprocess.run(
            line,
            env={**environment, **environment_for(mpiexec.flavour)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return failure(f"two ranks do not come back ({type(error).__name__})", remedy)
    # Count the lines' content instead of parsing lines: two ranks may write on the same line.
    if done.returncode == 0 and done.stdout.count(json.dumps({"size": 2, "sum": 3})) == 2:
        return ok("two ranks talk, with MPI_THREAD_MULTIPLE")
    last = ([*done.stderr.strip().splitlines(), *done.stdout.strip().splitlines()] or ["no word"])[-1]
    return failure(f"two ranks do not talk: {last}", remedy)


def _one_sided(mpiexec: Mpiexec, environment: Mapping[str, str]) -> list[Finding]:
    """Report known limits of the version's windows between nodes; a run tests them and falls back on messages."""
    name = f"{mpiexec.flavour} {mpiexec.version}"
    by_messages = "hogwild-* over several nodes goes by messages instead"
    if mpiexec.flavour == "openmpi" and _WITHOUT_WINDOWS.match(mpiexec.version):
        text = f"{name} has no one-sided windows over TCP with MPI_THREAD_MULTIPLE: {by_messages}"
        return [warning(text, "nothing else needs them; Open MPI 5 and MPICH 4 have them")]
    if mpiexec.flavour == "mpich" and environment.get(_PROGRESS, "0") in ("", "0"):
        text = f"{name} changes windows of other nodes only while their owners call MPI: {by_messages}"
        return [ok(f"{text} ({_PROGRESS}=1 changes that, for a core a rank)")]
    return []


def main() -> int:
    """Run one of the two ranks: add 1 and 2 over both, and print one JSON line, or the error."""
    import numpy

    from hpcdl.comm.mpi.communicator import world

    try:
        communicator = world()
        total = numpy.array([communicator.rank + 1.0])
        communicator.allreduce(total)
    except HpcdlError as error:
        print(error, file=sys.stderr)
        return 1
    line = json.dumps({"size": communicator.size, "sum": int(total[0])}) + "\n"
    sys.stdout.write(line)  # one write: an unbuffered print writes the line's end separately, and ranks share a pipe
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
