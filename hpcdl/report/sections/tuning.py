"""A node's search for its best settings: trials, speed against threads, what each setting is worth, the winner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpcdl.core.statistics import Estimate, estimate_of, welch_of_estimates
from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.document import Bounds, Cell, Column, Figure, Interval, Listing, Section, Series, Table, number
from hpcdl.report.runs.searches import ThreadCurve, TunedNode, TunedTrial, words

LOG_SPAN = 8.0
"""Ratio of the most to the fewest threads from which the axis is logarithmic."""


def build(analysis: Analysis) -> Section | None:
    """Return the section, or None without profiles and trial logs."""
    if not analysis.tunings:
        return None
    lines, items = [], list[Table | Figure | Listing]()
    rate = Column.rate(analysis.counted)
    for order, tuning in enumerate(analysis.tunings, start=1):
        which = f"{tuning.name}: " if len(analysis.tunings) > 1 else ""
        lines += [which + line for line in _sentences(tuning, rate)]
        items += [
            *_figures(tuning, order, which, rate),
            _attempts(tuning, which, rate),
            *_effects(tuning, which),
            *_drawing(tuning, which),
        ]
    return Section(name="tuning", title="Tuning of the node", lines=lines, items=items)


def winner_line(tuning: TunedNode, rate: Column) -> str:
    """Return the winner, its speed in units of `rate` and its certainty, or that there is none."""
    if tuning.images_per_second is None and not tuning.attempts:
        return f"{tuning.model}: {words(tuning.settings)}, written without a trial"
    if tuning.images_per_second is None:
        return f"no candidate of {tuning.model} ran: {tuning.verdict}"
    speed = number(tuning.images_per_second)
    half = f" ± {number(tuning.ci95)}" if tuning.ci95 is not None else ""
    return f"{tuning.model}: {words(tuning.settings)} with {speed}{half} {rate.name}; {tuning.verdict}"


def _sentences(tuning: TunedNode, rate: Column) -> list[str]:
    gpus = (f"{number} x {name}" for name, number in tuning.devices.items())
    where = ", ".join(filter(None, (tuning.processor, *gpus, tuning.machine, tuning.engine))) or "unknown"
    lines = [
        f"Winner for {winner_line(tuning, rate)}.",
        f"Batch {tuning.batch_size} per rank; measured on: {where}.",
    ]
    lines += [line for attempt in tuning.attempts if attempt.origin and (line := _beside(tuning, attempt))]
    failed = [attempt for attempt in tuning.attempts if attempt.images_per_second is None]
    if failed:
        text = listed([f"{words(trial.settings)} ({trial.status})" for trial in failed], 2)
        lines.append(f"{counted(len(failed), 'candidate')} failed: {text}.")
    return lines


def _beside(tuning: TunedNode, attempt: TunedTrial) -> str:
    """Return how much faster the winner is than a candidate with an origin; empty if either was not measured."""
    winner, other = _estimate(tuning), _estimate(attempt)
    if winner is None or other is None:
        return ""
    if attempt.settings == tuning.settings:
        return f"The winner is {attempt.origin}."
    ratio = welch_of_estimates(winner, other)
    times = f"{ratio.value:.2f} times as fast as {attempt.origin}"
    if ratio.low is None or ratio.high is None:
        return f"{times} (too few samples for an interval)."
    unsure = ", not distinguishable" if ratio.low <= 1 <= ratio.high else ""
    return f"{times} [{ratio.low:.2f}, {ratio.high:.2f}]{unsure}."


def _estimate(measured: TunedNode | TunedTrial) -> Estimate | None:
    rate, half = measured.images_per_second, measured.ci95
    if rate is None or not 0 < rate < math.inf:
        return None
    # A file from elsewhere may hold any half width.
    return estimate_of(rate, half if half is not None and 0 <= half < rate else None, measured.n)


def _figures(tuning: TunedNode, order: int, which: str, rate: Column) -> list[Figure]:
    curves = [curve for curve in tuning.curves if len(curve.points) > 1]
    if not curves:
        return []
    table = _curve_table(curves, which, rate)
    series = [_series(curve, color) for color, curve in enumerate(curves)]
    ends = [max(curve.points, key=lambda point: point.images_per_second) for curve in curves]
    best = listed([f"{number(end.images_per_second)} {rate.name} at {end.threads} threads" for end in ends])
    threads = [point.threads for curve in curves for point in curve.points]
    return [
        Figure(
            name=f"tuning-{order}",
            title=f"{which}{tuning.model}: {rate.name} against threads on the node",
            alt=f"Speed of the best candidate at each number of threads on the node; at best {best}.",
            x_label="threads on the node (ranks x intra-op threads)",
            y_label=rate.name,
            series=series,
            table=table,
            x_log=max(threads) >= LOG_SPAN * min(threads),
        )
    ]


def _series(curve: ThreadCurve, color: int) -> Series:
    points = curve.points
    return Series(
        label="best of each count" if curve.batch_size is None else f"batch {curve.batch_size}",
        x=[point.threads for point in points],
        y=[point.images_per_second for point in points],
        low=[None if point.ci95 is None else point.images_per_second - point.ci95 for point in points],
        high=[None if point.ci95 is None else point.images_per_second + point.ci95 for point in points],
        color=color,
    )


def _curve_table(curves: Sequence[ThreadCurve], which: str, rate: Column) -> Table:
    columns = (Column(name="batch"), Column(name="threads", kind="count"), rate, Column(name="settings"))
    rows: list[tuple[Cell, ...]] = [
        (
            "" if curve.batch_size is None else str(curve.batch_size), point.threads,
            Interval(value=point.images_per_second, half=point.ci95, n=point.n), words(point.settings),
        )
        for curve in curves
        for point in curve.points
    ]  # fmt: skip
    return Table(title=f"{which}Best candidate at each number of threads", columns=columns, rows=rows)


def _attempts(tuning: TunedNode, which: str, rate: Column) -> Table:
    columns = (
        rate, Column(name="of the best", kind="percent"), Column(name="samples", kind="count"),
        Column(name="memory per rank", kind="bytes"), Column(name="status"), Column(name="settings"),
    )  # fmt: skip
    best = max((attempt.images_per_second or 0.0 for attempt in tuning.attempts), default=0.0)
    note = "± is the half width of the 95 % interval over fresh processes; † measured once."
    rows = [_attempt_row(attempt, best) for attempt in tuning.attempts]
    return Table(title=f"{which}Trials, the fastest first", columns=columns, rows=rows, note=note)


def _attempt_row(trial: TunedTrial, best: float) -> tuple[Cell, ...]:
    speed = trial.images_per_second
    rate = None if speed is None else Interval(value=speed, half=trial.ci95, n=trial.n)
    status = f"{trial.status}: {trial.message}" if trial.message else trial.status
    text = words(trial.settings) + (f" ({trial.origin})" if trial.origin else "")
    return rate, None if speed is None else speed / best, trial.n, trial.memory_bytes_per_rank, status, text


def _effects(tuning: TunedNode, which: str) -> list[Table]:
    if not tuning.effects:
        return []
    columns = (
        Column(name="setting"), Column(name="value"), Column(name="effect", kind="percent"),
        Column(name="trials", kind="count"),
    )  # fmt: skip
    rows = [
        (each.setting, each.value, Bounds(value=each.ratio - 1, low=each.low - 1, high=each.high - 1), each.num_trials)
        for each in tuning.effects
    ]
    note = (
        "Speed against the mean of the setting's values, all settings fitted together; the strongest setting first. "
        "[low, high] is the 95 % interval: where it holds 0, the trials do not show an effect."
    )
    return [Table(title=f"{which}What each setting is worth", columns=columns, rows=rows, note=note)]


def _drawing(tuning: TunedNode, which: str) -> list[Listing]:
    if not tuning.picture:
        return []
    alt = f"The node with the winner's ranks on its cores: {words(tuning.settings)}."
    return [Listing(title=f"{which}The node with the chosen binding", alt=alt, lines=tuning.picture)]
