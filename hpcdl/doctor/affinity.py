"""The cores that this process may run on, against the machine and the job's allocation."""

from __future__ import annotations

import os

from hpcdl.doctor.finding import Finding, Subject, ok, warning
from hpcdl.node.topology.cpusets import format_list

CHECK = "affinity"


def check(subject: Subject) -> list[Finding]:
    """The mask. A login shell with one core of many, or a job with fewer than it was given, is named."""
    mask = sorted(os.sched_getaffinity(0))
    present = os.cpu_count() or len(mask)
    granted_text = subject.environment.get("SLURM_CPUS_ON_NODE", "")
    granted = int(granted_text) if granted_text.isdigit() else None
    where = f"this process may use CPUs {format_list(mask)}, {len(mask)} of {present}"
    if granted is not None and len(mask) < granted <= present:
        remedy = "start it without --cpu-bind (srun --cpu-bind=none): hpcdl binds by itself"
        return [warning(CHECK, f"{where}, but the job was given {granted}", remedy)]
    if len(mask) == 1 and present > 1:
        remedy = "look at `taskset -p $$`; under mpiexec use --bind-to none, under srun --cpu-bind=none"
        return [warning(CHECK, f"{where}: every thread of every rank would share one core", remedy)]
    return [ok(CHECK, where)]
