"""Settings beyond strategy and sizes: those that cost time keep runs apart, all others that differ are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from hpcdl.report.analysis.names import listed
from hpcdl.report.runs.run import Run

COSTLY = (
    "precision", "optimizer", "lars", "compress", "accumulate", "backup-workers", "period", "variant", "unpacked",
    "groups", "bucket-size", "placement", "deterministic", "xla",
)  # fmt: skip
"""Settings that change what a step does or sends: runs that differ in one are never averaged."""
_IDENTITY = (
    "model", "data", "strategy", "batch-size", "ranks", "servers", "nodes", "ranks-per-node", "seed", "run-dir",
    "resume", "profile", "config",
)  # fmt: skip
"""Settings that a record holds elsewhere, or that name a run."""


def told_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs with `variant` naming the costly settings in which those of one network and data set differ."""
    jobs: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        jobs.setdefault((run.model, run.data), []).append(run)
    varying = {job: _varying(members, COSTLY) for job, members in jobs.items()}
    return [
        dataclasses.replace(run, variant=_told(run, names)) if (names := varying[run.model, run.data]) else run
        for run in runs
    ]


def other_differences(runs: Sequence[Run]) -> Iterable[str]:
    """A line for the settings that differ, were not kept apart, and may matter to accuracy."""
    names = sorted({name for run in runs for name in run.config} - {*COSTLY, *_IDENTITY})
    varying = _varying(runs, names)
    if varying:
        yield f"runs differ in settings that do not keep them apart: {listed(varying, 6)}"


def _varying(runs: Sequence[Run], names: Iterable[str]) -> list[str]:
    return [name for name in names if len({run.config[name] for run in runs if name in run.config}) > 1]


def _told(run: Run, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {run.config[name]}" for name in names if name in run.config)
