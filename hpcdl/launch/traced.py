"""The trace of a run combined with its record: on one clock, after the warm-up steps."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcdl.core.errors import CorruptError, UnknownNameError, UsageError
from hpcdl.core.records.run_record import read_record
from hpcdl.core.units import counted
from hpcdl.report.runs.findings import HostNetwork, SlowRank, TracedRun
from hpcdl.report.runs.run import FEW_STEPS
from hpcdl.strategies.table import find_strategy
from hpcdl.trace.findings import Findings, findings
from hpcdl.trace.network import HostTraffic
from hpcdl.trace.recorder import FOLDER
from hpcdl.trace.steps import Merged, Steps, merge, read_run, readiness, steps_of

MOST_TRACES = 12
"""Most traces per report, since each is read as a whole."""


def look_into(run_dir: Path, log: Callable[[str], None]) -> tuple[Merged, Steps, Findings]:
    """Return a run's trace, its steps and findings. Raises UsageError if there is none, CorruptError if damaged."""
    merged = merge(read_run(run_dir))
    synchronous, first, link, workers = True, 0, None, 0
    try:
        record = read_record(run_dir)
        # A trace is that of the last start, whose first steps warmed up again.
        first = record.warmup_steps + max(record.resumed_from_steps, default=0)
        link, workers = record.link_bytes_per_second, record.workers
        synchronous = record.inference is None and find_strategy(record.strategy).features.synchronous
    except CorruptError as error:
        log(f"{error}: taken for a run whose ranks step together")
    except UnknownNameError:  # a script's run: its ranks step together
        pass
    steps = steps_of(merged, synchronous=synchronous, first=first)
    if steps.numbers[-1] < first:
        log("all traced steps are warm-up, so its times are not those of training; run more steps")
    elif len(steps.numbers) < FEW_STEPS:
        log(f"only {counted(len(steps.numbers), 'step')} after the warm-up: slow ranks may be chance")
    if synchronous and (traced := len(steps.ranks)) < workers:
        log(f"traces of {traced} of {workers} workers; waiting for the others counts as communication")
    return merged, steps, findings(merged, steps, link)


def traced_runs(run_dirs: Sequence[tuple[str, Path]], log: Callable[[str], None]) -> list[TracedRun]:
    """Return the trace summaries of the traced runs among these (name, directory); `log` receives what is omitted."""
    runs = [(name, run_dir) for name, run_dir in run_dirs if os.path.isdir(f"{run_dir}{os.sep}{FOLDER}")]  # noqa: PTH112  thousands
    if len(runs) > MOST_TRACES:
        log(f"{len(runs)} runs are traced; the report looks into the first {MOST_TRACES} (hpcdl trace RUN for others)")
    traced, remarks = [], list[str]()
    for name, run_dir in runs[:MOST_TRACES]:
        try:
            merged, steps, found_in = look_into(run_dir, remarks.append)
            traced.append(dataclasses.replace(summary_of(name, found_in), ready=readiness(merged, steps)))
        except (CorruptError, UsageError) as error:
            log(f"trace of {name} left out: {error}")
    for text, times in Counter(remarks).items():
        log(f"{text} ({counted(times, 'traced run')})")
    return traced


def summary_of(name: str, findings: Findings) -> TracedRun:
    """Return the findings in the form that a report shows."""
    return TracedRun(
        name=name,
        ranks=findings.ranks,
        steps=findings.steps,
        step_s=findings.step_s,
        hidden=findings.overlap,
        gap_median_s=findings.gaps.median_s,
        gap_p90_s=findings.gaps.p90_s,
        idle_s=findings.gaps.usable_s_per_step,
        recording=findings.overhead,
        critical_path={entry.part: entry.seconds_per_step for entry in findings.critical_path},
        gains_s={entry.part: entry.gain_s for entry in findings.critical_path},
        slow_ranks=[
            SlowRank(
                rank=entry.rank,
                host=entry.host,
                cause=entry.cause,
                seconds_per_step=entry.seconds_per_step,
                evidence=entry.evidence,
            )
            for entry in findings.stragglers
        ],
        network=[_as_shown(entry, findings.network) for entry in findings.network],
    )


def _as_shown(host: HostTraffic, hosts: Sequence[HostTraffic]) -> HostNetwork:
    begin_s = min(float(traffic.times_s[0]) for traffic in hosts)
    middles_s = (host.times_s[:-1] + host.times_s[1:]) / 2 - begin_s
    return HostNetwork(
        host=host.host,
        mean=host.mean,
        busiest=host.busiest,
        link_share=host.link_share,
        samples=list(zip(middles_s.tolist(), host.rates.tolist(), strict=True)),
    )
