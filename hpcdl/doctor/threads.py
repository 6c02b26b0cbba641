"""Threads times ranks against the cores that they may use."""

from __future__ import annotations

import os

from hpcdl.doctor.finding import Finding, Subject, ok, warning

CHECK = "threads"
VARIABLES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "MKL_NUM_THREADS")


def check(subject: Subject) -> list[Finding]:
    """Thread counts that the environment forces. hpcdl sets its own where the environment is silent."""
    cpus = len(os.sched_getaffinity(0))
    found = []
    for name in VARIABLES:
        text = subject.environment.get(name, "").split(",")[0]
        if not text.isdigit():
            continue
        wanted = int(text) * subject.ranks_here
        if wanted > cpus:
            what = f"{name}={text} x {subject.ranks_here} ranks on a node = {wanted} threads on {cpus} CPUs"
            found.append(warning(CHECK, what, f"unset {name}: `hpcdl train` shares the cores out by itself"))
    if subject.ranks_here > cpus:
        what = f"{subject.ranks_here} ranks on a node with {cpus} usable CPUs"
        found.append(warning(CHECK, what, "ask for fewer --ranks-per-node"))
    return found or [ok(CHECK, f"{subject.ranks_here} rank(s) a node, {cpus} CPUs, no variable asks for more threads")]
