"""The machine, the software, what ran and what failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpcdl.core.records.run_record import LOST, is_measured
from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.settings import default_of, listed_values, shortened_numbers
from hpcdl.report.document import Cell, Column, Section, Table, percent
from hpcdl.report.runs.run import Run

MOST_VALUES = 12
MOST_FAILED = 50
"""Maximum number of rows in the table of failed runs."""


def build(analysis: Analysis) -> Section | None:
    """Return the section, or None without runs: a reader must know where the numbers come from."""
    if not analysis.runs:
        return None
    items = [_setup(analysis.runs), *_settings([run for run in analysis.runs if run.usable])]
    failed = [run for run in analysis.runs if not run.usable]
    if failed:
        items.append(_failed(failed, Column.rate(analysis.counted)))
    return Section(name="setup", title="Machine, software and runs", items=items)


def _setup(runs: Sequence[Run]) -> Table:
    rows: list[tuple[Cell, ...]] = [("runs", _statuses(runs))]
    facts = (
        ("machine", [run.machine for run in runs]),
        ("processor", [run.processor for run in runs]),
        ("cores per node", [str(run.cores_per_node) for run in runs if run.cores_per_node]),
        ("nodes", [str(run.nodes) for run in runs]),
        ("hosts", [host for run in runs for host in run.hosts]),
        ("models", [run.model for run in runs]),
        ("strategies", [run.strategy for run in runs]),
        ("data", [run.data for run in runs]),
        ("workers", [str(run.workers) for run in runs]),
        ("batch per worker", [str(run.batch_per_rank) for run in runs]),
        ("GPUs", [f"{name} ({number} workers)" for run in runs for name, number in run.accelerators.items()]),
        ("GPU utilisation", [percent(run.gpu_utilisation) for run in runs if run.gpu_utilisation is not None]),
        ("fast kernels", [name for run in runs for name in run.fast_kernels]),
    )
    for name, values in facts:
        texts = [value for value in dict.fromkeys(values) if value]
        if texts:
            rows.append((name, listed(sorted(texts, key=_numeric_order), 12)))
    software: dict[str, None] = {}
    for run in runs:
        software |= dict.fromkeys(f"{name} {version}" for name, version in run.software.items())
        # Rows of an imported table have a column of versions, but no list of packages.
        if not run.software and run.version:
            software[run.version] = None
    if software:
        rows.append(("software", listed(sorted(software), 20)))
    return Table(title="What ran, where", columns=(Column(name="what"), Column(name="value")), rows=rows)


def _settings(runs: Sequence[Run]) -> list[Table]:
    """Return the hyper-parameters of the runs, if records hold them."""
    rows = [
        (key, listed(sorted(shortened_numbers(values).values(), key=_numeric_order), MOST_VALUES), default_of(key))
        for key, values in listed_values(runs).items()
    ]
    if not rows:
        return []
    silent = sum(not run.config for run in runs)
    note = "Every other setting had its default in all of these runs (hpcdl config show)."
    note += f" {counted(silent, 'run')} of elsewhere says nothing of its settings." if silent else ""
    columns = (Column(name="setting"), Column(name="values"), Column(name="default"))
    return [Table(title="Hyper-parameters of what ran", columns=columns, rows=rows, note=note)]


def _statuses(runs: Sequence[Run]) -> str:
    counts = Counter(run.status for run in runs)
    return f"{counted(len(runs), 'run')}: " + ", ".join(f"{count:,} {status}" for status, count in counts.most_common())


def _numeric_order(text: str) -> tuple[int, int, str]:
    # A record may hold any text, and int() refuses more than 4,300 digits.
    return (0, int(text), "") if text.isdecimal() and len(text) < 20 else (1, 0, text)


def _failed(failed: Sequence[Run], rate: Column) -> Table:
    columns = (
        Column(name="run"), Column(name="strategy"), Column(name="model"), Column(name="workers", kind="count"),
        Column(name="status"), Column(name="message"),
    )  # fmt: skip
    rows = [
        (run.name, run.strategy, run.model, run.workers, run.status, run.message or _reason(run, rate))
        for run in failed[:MOST_FAILED]
    ]
    num_more = len(failed) - len(rows)
    return Table(title="Runs in no mean", columns=columns, rows=rows, note=f"and {num_more:,} more" if num_more else "")


def _reason(run: Run, rate: Column) -> str:
    if not is_measured(run.status):
        return "its processes are gone" if run.status == LOST else "the record was not finished"
    return "no throughput" if run.images_per_second is None else f"throughput {run.images_per_second:g} {rate.name}"
