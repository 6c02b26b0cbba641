"""What a gibibyte of traffic buys: accuracy against the bytes that a rank has sent, if runs differ much in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hpcdl.core.units import counted, format_bytes, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.settings import settings_of_runs
from hpcdl.report.document import Cell, Column, Figure, Interval, Section, Series, Table
from hpcdl.report.runs.run import Run, learned_apart, positive
from hpcdl.report.sections.learning import final_accuracy, representatives

LEAST_RATIO = 2.0
"""Minimum ratio of bytes per step between two runs on as many workers for a comparison of their traffic."""
MOST_FIGURES, MOST_CURVES = 2, 8
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True, kw_only=True)
class Contestants:
    """The settings of one network, data set and number of workers whose runs counted bytes and evaluated.

    `settings` holds the runs of each by a distinguishing name, in ascending order of bytes sent. `target` is the
    highest whole percentage that each setting reached, by the mean of its runs' best accuracies; 0 if there is none.
    """

    subject: str
    settings: Sequence[tuple[str, Sequence[Run]]]
    target: float


def build(analysis: Analysis) -> Section | None:
    """A figure and a table for each network with several amounts of traffic; None if there is none."""
    contests = contestants(analysis.runs)
    if not contests:
        return None
    figures = [_figure(contest, number) for number, contest in enumerate(contests[:MOST_FIGURES], start=1)]
    lines = [
        "Bytes are those that one rank has sent by then: those of a measured step times the steps. Curves further to"
        " the left buy their accuracy with less traffic.",
        *(line for contest in contests if (line := _sentence(contest))),
    ]
    if len(contests) > MOST_FIGURES:
        lines.append(f"The figures show {MOST_FIGURES} of {len(contests)} such comparisons, those of most workers.")
    items: list[Figure | Table] = [*figures, *map(_table, contests)]
    return Section(name="traffic", title="Accuracy for traffic", lines=lines, items=items)


def contestants(runs: Sequence[Run]) -> list[Contestants]:
    """Return those of each network, data set and number of workers with different traffic, most workers first."""
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        comparable = run.usable and run.workers > 1 and positive(run.bytes_per_step) and _points(run)
        if comparable:
            groups.setdefault((run.model, run.data, run.workers), []).append(run)
    several = len({key[:2] for key in groups}) > 1
    contests = []
    for (model, data, workers), members in groups.items():
        settings = _named(members)
        per_step = [_mean([run.bytes_per_step or 0.0 for run in setting_runs]) for _, setting_runs in settings]
        if max(per_step) < LEAST_RATIO * min(per_step):
            continue
        size_text = counted(workers, "worker")
        contests.append(
            Contestants(
                subject=", ".join([model, data, size_text] if several else [size_text]),
                settings=sorted(settings, key=lambda pair: _mean([sent_bytes(run) for run in pair[1]])),
                target=_target([setting_runs for _, setting_runs in settings]),
            )
        )
    return sorted(contests, key=lambda item: -item.settings[0][1][0].workers)


def sent_bytes(run: Run) -> float:
    """Return the bytes that a rank sent from the run's first step to its last evaluation."""
    return (run.bytes_per_step or 0.0) * _points(run)[-1][0]


def bytes_to(run: Run, target: float) -> float | None:
    """Return the bytes that a rank had sent when accuracy first reached `target`; None if it never did."""
    step = next((step for step, accuracy in _points(run) if accuracy >= target), None)
    return None if step is None else (run.bytes_per_step or 0.0) * step


def _points(run: Run) -> list[tuple[int, float]]:
    """Return steps and accuracies of the run's evaluations: held out if there are any, else of training."""
    for field in ("val_accuracy", "accuracy"):
        points = [(point.step, value) for point in run.history if (value := getattr(point, field)) is not None]
        if points and all(0 <= value <= 1 for _, value in points) and points[-1][0] > 0:
            return points
    return []


def _named(runs: Sequence[Run]) -> list[tuple[str, Sequence[Run]]]:
    """Return the runs of each setting with a distinguishing name."""
    groups = settings_of_runs(runs)
    names = {id(run): name for name, run in representatives(groups)}
    return [(next(names[id(run)] for run in group if id(run) in names), group) for group in groups]


def _target(settings: Sequence[Sequence[Run]]) -> float:
    best = min(_mean([max(value for _, value in _points(run)) for run in runs]) for runs in settings)
    # 100 x 0.29 is 28.999999999999996 in floating point.
    return math.floor(100 * best + 1e-9) / 100


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sentence(contest: Contestants) -> str:
    """Return which setting reached the accuracy common to all with the fewest bytes, and which with the most."""
    means = [
        (name, _mean([sent for sent in amounts if sent is not None]))
        for name, runs in contest.settings
        if None not in (amounts := [bytes_to(run, contest.target) for run in runs])
    ]
    if contest.target <= 0 or len(means) < 2:
        return ""
    (least, few), (most, many) = min(means, key=lambda pair: pair[1]), max(means, key=lambda pair: pair[1])
    return (
        f"{contest.subject}: to {100 * contest.target:.0f} % accuracy a rank sent {format_bytes(few)} by {least}, and"
        f" {format_bytes(many)} by {most}, {many / few:,.3g} times as much."
    )


def _figure(contest: Contestants, number: int) -> Figure:
    series, rows = [], []
    most = max(sent_bytes(run) for _, runs in contest.settings for run in runs)
    unit, size = next((pair for pair in _UNITS if most >= pair[1]), ("B", 1))
    for color, (name, runs) in enumerate(contest.settings[:MOST_CURVES]):
        run = max(runs, key=lambda one: len(_points(one)))
        # The axis is logarithmic, so an evaluation before the first step has no place on it.
        points = [(step * (run.bytes_per_step or 0.0), value) for step, value in _points(run) if step > 0]
        series.append(
            Series(
                label=name, x=[sent / size for sent, _ in points], y=[value for _, value in points], style="line",
                color=color, strategy=run.strategy,
            )
        )  # fmt: skip
        rows += [(name, sent, value) for sent, value in points]
    ends = [f"{one.label} ends at {100 * one.y[-1]:.3g} % after {one.x[-1]:.3g} {unit}" for one in series]
    title = f"Accuracy against bytes sent, {contest.subject}"
    columns = (
        Column(name="setting"),
        Column(name="sent by a rank", kind="bytes"),
        Column(name="accuracy", kind="percent"),
    )
    return Figure(
        name="accuracy-traffic" if number == 1 else f"accuracy-traffic-{number}",
        title=title,
        alt=f"Accuracy against what a rank has sent: {listed(ends, 8)}.",
        x_label=f"{unit} sent by a rank",
        y_label="accuracy",
        series=series,
        table=Table(title=title, columns=columns, rows=rows),
        x_log=True,
        x_counts=False,
        y_percent=True,
    )


def _table(contest: Contestants) -> Table:
    target = f"to {100 * contest.target:.0f} %"
    columns = (
        Column(name="setting"), Column(name="runs", kind="count"), Column(name="bytes per step and rank", kind="bytes"),
        Column(name="sent by a rank", kind="bytes"), Column(name="of the most", kind="percent"),
        Column(name="accuracy", kind="percent"), Column(name=f"sent {target}", kind="bytes"),
    )  # fmt: skip
    most = max(_mean([sent_bytes(run) for run in runs]) for _, runs in contest.settings)
    rows: list[tuple[Cell, ...]] = []
    for name, runs in contest.settings:
        sent = [sent_bytes(run) for run in runs]
        reached = [bytes_to(run, contest.target) for run in learned_apart(runs)]
        finals = [final[0] for run in learned_apart(runs) if (final := final_accuracy(run)) is not None]
        rows.append((
            name, len(runs), Interval.of(run.bytes_per_step for run in runs), Interval.of(sent), _mean(sent) / most,
            Interval.of(finals), None if None in reached else Interval.of(reached),
        ))  # fmt: skip
    note = f"{target[3:]}: the highest whole percentage that all settings reached, in the mean of runs; – where not."
    return Table(title=f"What traffic buys, {contest.subject}", columns=columns, rows=rows, note=note)
