"""How inference scales: samples per second and latency by number of ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from statistics import fmean

from hpcdl.core.statistics import welch_log_ratio
from hpcdl.core.units import common_unit, counted, format_rate, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.document import Bounds, Cell, Column, Interval, Section, Table
from hpcdl.report.runs.findings import Inferred


def build(analysis: Analysis) -> Section | None:
    """One row for each number of ranks with the same workload, with its efficiency against the smallest number."""
    if not analysis.inferences:
        return None
    usable = [call for call in analysis.inferences if call.usable]
    left = len(analysis.inferences) - len(usable)
    lines = [f"Left out of the table: {counted(left, 'call')} that did not finish, or was resumed."] if left else []
    lines += [f"{call.name}: {text}" for call in analysis.inferences for text in call.warnings]
    rate = Column.rate(common_unit(call.counted for call in usable))
    columns: tuple[Column, ...] = (
        Column(name="model"), Column(name="data"), Column(name="ranks", kind="count"),
        Column(name="nodes", kind="count"), Column(name="threads", kind="count"), Column(name="batch", kind="count"),
        Column(name="settings"), Column(name="calls", kind="count"), rate, Column(name="efficiency", kind="percent"),
        Column(name="median of a batch", kind="seconds"), Column(name="99th percentile", kind="seconds"),
        Column(name="first batch", kind="seconds"),
    )  # fmt: skip
    varying = _varying(usable)
    on_gpus = any(call.accelerators for call in usable)
    if on_gpus:
        columns += (Column(name="GPU"), Column(name="GPU utilisation", kind="percent"))
    groups: dict[Hashable, list[Inferred]] = {}
    for call in usable:
        groups.setdefault(_workload(call), []).append(call)
    rows = [row for group in groups.values() for row in _rows(group, varying, on_gpus=on_gpus)]
    note = (
        "Efficiency: rate per rank against the fewest ranks of the same model, data and settings. Latency: of a batch "
        "on one rank, without the first, which compiles."
    )
    items = (Table(title="Inference by ranks", columns=columns, rows=rows, note=note),) if rows else ()
    return Section(name="inference", title="Inference", lines=lines, items=items)


def _workload(inference: Inferred) -> Hashable:
    """Return what two rates must share to be points of one curve."""
    return (
        inference.model,
        inference.data,
        tuple(inference.splits),
        inference.batch_size,
        inference.machine,
        # The names without their numbers, which grow with the ranks.
        tuple(sorted(inference.accelerators)),
        tuple(sorted(inference.settings.items())),
    )


def _varying(usable: Sequence[Inferred]) -> list[str]:
    """Return the settings that differ between the calls."""
    keys = dict.fromkeys(key for call in usable for key in call.settings)
    # The batch size has a column of its own.
    return [key for key in keys if len({call.settings.get(key) for call in usable}) > 1 and key != "batch-size"]


def _rows(group: Sequence[Inferred], varying: Sequence[str], *, on_gpus: bool) -> list[tuple[Cell, ...]]:
    points: dict[tuple[int, int], list[Inferred]] = {}
    for inference in sorted(group, key=lambda inference: (inference.ranks, inference.nodes)):
        points.setdefault((inference.ranks, inference.nodes), []).append(inference)
    base = next(iter(points.values()))
    return [_row(runs, base, varying) + (_gpus(runs) if on_gpus else ()) for runs in points.values()]


def _gpus(runs: Sequence[Inferred]) -> tuple[Cell, ...]:
    """Return the devices of the calls, and their utilization."""
    return listed(list(runs[0].accelerators)), Interval.of(call.gpu_utilisation for call in runs)


def _row(runs: Sequence[Inferred], base: Sequence[Inferred], varying: Sequence[str]) -> tuple[Cell, ...]:
    first = runs[0]
    return (
        first.model,
        f"{first.data}, {listed(first.splits)}",
        first.ranks,
        first.nodes,
        first.threads,
        first.batch_size,
        ", ".join(f"{key} {first.settings.get(key, '')}" for key in varying),
        len(runs),
        Interval.of(call.images_per_second for call in runs),
        _efficiency(runs, base),
        Interval.of(call.batch_seconds_median for call in runs),
        Interval.of(call.batch_seconds_p99 for call in runs),
        Interval.of(call.first_batch_seconds for call in runs),
    )


def _efficiency(runs: Sequence[Inferred], base: Sequence[Inferred]) -> Bounds:
    if runs is base:
        return Bounds(value=1.0, low=None, high=None)
    ratio = welch_log_ratio(_per_rank(runs), _per_rank(base))
    return Bounds(value=ratio.value, low=ratio.low, high=ratio.high, n=min(ratio.n, ratio.n_base))


def _per_rank(items: Sequence[Inferred]) -> list[float]:
    return [(call.images_per_second or 0.0) / call.ranks for call in items]


def line(analysis: Analysis) -> str:
    """Return a sentence about the fastest point: the mean of its calls, since the fastest call may be a lucky one."""
    usable = [inference for inference in analysis.inferences if inference.usable]
    if not usable:
        return "no call finished that was not resumed"
    points: dict[Hashable, list[Inferred]] = {}
    for call in usable:
        points.setdefault((_workload(call), call.ranks, call.nodes), []).append(call)
    rates = {key: fmean(call.images_per_second or 0.0 for call in calls) for key, calls in points.items()}
    best = max(rates, key=rates.__getitem__)
    first, calls = points[best][0], len(points[best])
    of_calls = f"mean of {calls} calls" if calls > 1 else "one call"
    return (
        f"at best {format_rate(rates[best], first.counted)} with {counted(first.ranks, 'rank')} "
        f"({first.model} on {first.data}, {listed(first.splits)}; {of_calls})"
    )
