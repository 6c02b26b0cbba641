"""The batch system, and whether its srun speaks the process-management interface that the MPI needs."""

from __future__ import annotations

import re

from hpcdl.cluster.batch.script import batch_launcher
from hpcdl.cluster.batch.systems import call
from hpcdl.cluster.launchers.mpiexec import mpi_flavour
from hpcdl.cluster.launchers.slurm import PMI_BY_FLAVOUR, PMI_VARIABLE, srun_mpi
from hpcdl.cluster.launchers.table import find_launcher
from hpcdl.core.errors import HpcdlError
from hpcdl.doctor.finding import Finding, Subject, failure, ok, warning

CHECK = "scheduler"


def check(subject: Subject) -> list[Finding]:
    """Which launcher is in use, which one `hpcdl submit` would use, and the PMI between srun and the MPI."""
    here, submitted = find_launcher(subject.environment).name, batch_launcher(subject.environment)
    found = [ok(CHECK, f"ranks start here by {here}; `hpcdl submit` uses {submitted}")]
    return [*found, *_pmi(subject)] if submitted in ("slurm", "ibrun") else found


def _pmi(subject: Subject) -> list[Finding]:
    try:
        flavour = mpi_flavour()
    except HpcdlError:
        return []  # the check of MPI says it
    try:
        known = _known(call(["srun", "--mpi=list"]))
    except HpcdlError as error:
        remedy = "ask the site's staff; outside jobs of Slurm ranks start by mpiexec on this node"
        return [warning(CHECK, f"srun is there, but {error}", remedy)]
    needed = srun_mpi(flavour, subject.environment)
    if needed not in known:
        text = f"{flavour} needs srun --mpi={needed}, and this srun knows {', '.join(sorted(known)) or 'none'}"
        remedy = (
            f"install an MPI of the other kind, or set {PMI_VARIABLE} to the interface that {flavour} was built for"
        )
        return [failure(CHECK, text, remedy)]
    if needed.partition("_")[0] != PMI_BY_FLAVOUR[flavour].partition("_")[0]:
        text = (
            f"{PMI_VARIABLE}={needed}, but {flavour} usually needs {PMI_BY_FLAVOUR[flavour]}: ranks may not be one job"
        )
        return [failure(CHECK, text, f"unset {PMI_VARIABLE}")]
    return [ok(CHECK, f"srun --mpi={needed} for {flavour}")]


def _known(text: str) -> set[str]:
    """The names in what `srun --mpi=list` prints: one a line, or `srun: pmix`, after a heading."""
    lines = [line.removeprefix("srun:").strip() for line in text.splitlines()]
    return {line for line in lines if re.fullmatch(r"[a-z0-9_]+", line)}
