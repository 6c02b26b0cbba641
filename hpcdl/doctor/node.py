"""The resources of the node that this process may use: cores, threads, open files and memory; and its profile."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from hpcdl.core.units import format_bytes, format_list
from hpcdl.doctor.table import Finding, Subject, failure, ok, warning
from hpcdl.node.machines import read_topology
from hpcdl.node.profile import find_profile

THREAD_VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "MKL_NUM_THREADS")
OPEN_FILES, PROCESSES = 1024, 512
NEEDED_MEMORY_BYTES, COMFORTABLE_MEMORY_BYTES = 1024**3, 4 * 1024**3
"""A process with TensorFlow uses 0.5 to 1 GB before it has a model."""


def check_affinity(subject: Subject) -> list[Finding]:
    """Check the CPU mask. Warns about a login shell with one core of many, or a job with fewer cores than granted."""
    mask = sorted(os.sched_getaffinity(0))
    present = os.cpu_count() or len(mask)
    granted_text = subject.environment.get("SLURM_CPUS_ON_NODE", "")
    granted = int(granted_text) if granted_text.isdigit() else None
    where = f"this process may use CPUs {format_list(mask)}, {len(mask)} of {present}"
    if granted is not None and len(mask) < granted <= present:
        remedy = "start it without --cpu-bind (srun --cpu-bind=none): hpcdl binds by itself"
        return [warning(f"{where}, but the job was given {granted}", remedy)]
    if len(mask) == 1 and present > 1:
        remedy = "look at `taskset -p $$`; under mpiexec use --bind-to none, under srun --cpu-bind=none"
        return [warning(f"{where}: every thread of every rank would share one core", remedy)]
    return [ok(where)]


def check_threads(subject: Subject) -> list[Finding]:
    """Check thread counts that the environment forces. hpcdl sets its own if the environment has none."""
    num_cpus = len(os.sched_getaffinity(0))
    findings = []
    for name in THREAD_VARIABLES:
        # OMP_NUM_THREADS may list numbers for nested levels, of which the first counts.
        text = subject.environment.get(name, "").split(",")[0]
        if not text.isdigit():
            continue
        wanted = int(text) * subject.ranks_here
        if wanted > num_cpus:
            what = f"{name}={text} x {subject.ranks_here} ranks on a node = {wanted} threads on {num_cpus} CPUs"
            findings.append(warning(what, f"unset {name}: `hpcdl train` shares the cores out by itself"))
    if subject.ranks_here > num_cpus:
        what = f"{subject.ranks_here} ranks on a node with {num_cpus} usable CPUs"
        findings.append(warning(what, "ask for fewer --ranks-per-node"))
    return findings or [ok(f"{subject.ranks_here} rank(s) a node, {num_cpus} CPUs, no variable asks for more threads")]


def check_profile(subject: Subject) -> list[Finding]:
    """Report the profile, or the advice to make one."""
    topology = read_topology()
    profile = find_profile("auto", subject.model, topology)
    if profile is not None:
        return [ok(profile.sentence)]
    text = f"no profile fits this node ({topology.summary}): threads are shared out evenly"
    return [warning(text, "hpcdl tune-threads --model M --batch-size B")]


def check_limits(subject: Subject) -> list[Finding]:
    """Check open files, processes, address space, and the job's memory limit."""
    findings = []
    for what, number, needed, flag in (
        ("open files", resource.RLIMIT_NOFILE, OPEN_FILES, "n"),
        ("processes and threads", resource.RLIMIT_NPROC, PROCESSES, "u"),
    ):
        soft, _ = resource.getrlimit(number)
        # RLIM_INFINITY is -1 in Python.
        if 0 <= soft < needed:
            findings.append(warning(f"{what}: {soft} allowed, {needed} wanted", f"ulimit -{flag} {needed}"))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= soft < COMFORTABLE_MEMORY_BYTES:
        text = f"address space is limited to {format_bytes(soft)}: TensorFlow maps more than that"
        findings.append(failure(text, "ulimit -v unlimited"))
    memory = allowed_memory(subject.control_groups)
    if memory is not None and memory < COMFORTABLE_MEMORY_BYTES:
        text = f"this job may use {format_bytes(memory)} of memory"
        level = failure if memory < NEEDED_MEMORY_BYTES else warning
        findings.append(level(text, "ask for more (sbatch --mem)"))
    return findings or [ok(f"files, processes and memory{'' if memory is None else f' ({format_bytes(memory)})'}")]


def allowed_memory(root: Path, cgroup: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the smallest memory limit of this process's control groups (version 2, or version 1's memory), or None."""
    limits = []
    for line in cgroup.read_text().splitlines() if cgroup.is_file() else []:
        _, kind, path = line.split(":", 2)
        base, name = (root, "memory.max") if not kind else (root / "memory", "memory.limit_in_bytes")
        if kind and "memory" not in kind.split(","):
            continue
        start = base / path.lstrip("/")
        # Limits of parent groups hold as well.
        for folder in (start, *start.parents):
            text = (folder / name).read_text().strip() if (folder / name).is_file() else "max"
            # Version 1 shows `no limit` as almost 2^63.
            limits += [int(text)] if text.isdigit() and int(text) < 2**62 else []
            if folder == base:
                break
    return min(limits, default=None)
