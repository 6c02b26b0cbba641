"""Throughput, latency and accuracy: the three measures of training, and the history of loss and accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.document import Column, Figure, Interval, Section, Series, Table
from hpcdl.report.runs.run import Run, learned_apart, positive
from hpcdl.report.sections.scaling import SEEN

MOST_LINES = 8
"""Maximum number of runs in one figure."""
_WHICH = "the middle one by final accuracy, else by loss"
_SHOWN = ("model", "strategy", "variant", "workers", "servers", "batch_per_rank", "data")


def build(analysis: Analysis) -> Section | None:
    """The three measures of each setting, and figures if runs kept a history."""
    groups = analysis.settings
    if not groups:
        return None
    table = _measures(groups, Column.rate(analysis.counted))
    curves = [(name, run) for name, run in representatives(groups) if len(run.history) > 1]
    figures = [figure for kind in _KINDS for figure in _figures(kind, curves[:MOST_LINES])]
    lines = [f"Latency is seconds per epoch. {_measured_on(groups)}"]
    if len(curves) > MOST_LINES:
        lines.append(f"The figures show {MOST_LINES} of {len(curves)} settings, the largest first; of each {_WHICH}.")
    elif curves:
        lines.append(f"The figures show one run of each setting, {_WHICH}.")
    return Section(name="learning", title="Throughput, latency and accuracy", lines=lines, items=(*figures, table))


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One quantity of the history."""

    name: str
    label: str
    held_out: str
    training: str
    percent: bool


_KINDS = (
    _Kind(name="accuracy", label="accuracy", held_out="val_accuracy", training="accuracy", percent=True),
    _Kind(name="loss", label="loss", held_out="val_loss", training="loss", percent=False),
)
_AXES = (("epochs", "epoch"), ("time", "seconds"))


HELD_OUT = "on held-out samples"
SPLITS = {"val": "on the split val", "test": "on the split test"}
TRAINING = "on training samples"
UNSTATED = "on samples that the imported table does not name"


def final_accuracy(run: Run) -> tuple[float, str] | None:
    """Return the final accuracy and its samples: held out if the run evaluated, else those of training.

    A column of an imported table does not say which samples it counted.
    """
    for field, kind in (("val_accuracy", HELD_OUT), ("accuracy", TRAINING)):
        for point in reversed(run.history):
            value = getattr(point, field)
            if value is not None and 0 <= value <= 1:
                return value, SPLITS.get(run.evaluated_on, kind) if kind == HELD_OUT else kind
    return None if run.accuracy is None else (run.accuracy, UNSTATED if run.imported else TRAINING)


def _measured_on(groups: Sequence[Sequence[Run]]) -> str:
    """Return a sentence that says on which samples the table's accuracies were measured."""
    finals = (final_accuracy(run) for group in groups for run in group)
    kinds = sorted({final[1] for final in finals if final is not None})
    caption = "Accuracy is at a run's end, the mean over the repeats of a setting, never the best of them"
    return f"{caption}; measured {' or '.join(kinds)}." if kinds else f"{caption}."


def _accuracy(run: Run) -> float | None:
    final = final_accuracy(run)
    return None if final is None else final[0]


def _measures(groups: Sequence[Sequence[Run]], rate: Column) -> Table:
    several = _several(groups)
    differing = [_difference(group[0], several) for group in groups] if several else []
    columns = (
        Column(name="model"), Column(name="strategy"), *([Column(name="settings")] if several else []),
        Column(name="workers", kind="count"),
        Column(name="batch per worker", kind="count"), Column(name="runs", kind="count"),
        rate, Column(name="step", kind="seconds"),
        Column(name="s per epoch", kind="number"), Column(name="accuracy", kind="percent"),
        Column(name="loss", kind="number"),
    )  # fmt: skip
    rows = [
        (
            group[0].model, group[0].strategy, *differing[index : index + 1], group[0].workers,
            group[0].batch_per_rank, len(group),
            Interval.of([run.images_per_second for run in group]), Interval.of([run.step_seconds for run in group]),
            Interval.of([run.seconds_per_epoch for run in group]),
            Interval.of([_accuracy(run) for run in apart]), Interval.of([run.loss for run in apart]),
        )
        for index, (group, apart) in enumerate(zip(groups, map(learned_apart, groups), strict=True))
    ]  # fmt: skip
    return Table(
        title="Three measures of each setting",
        columns=columns,
        rows=rows,
        note=f"± is the half width of the 95 % interval (Student's t); † measured once; {SEEN}.",
    )


_TELLING = ("machine", "version", "threads", "servers", "nodes", "data", "variant")


def _several(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return the fields, other than network, strategy, workers and batch, that distinguish rows of equal appearance."""
    seen: dict[tuple[object, ...], list[Run]] = {}
    for group in groups:
        run = group[0]
        seen.setdefault((run.model, run.strategy, run.workers, run.batch_per_rank), []).append(run)
    return [name for name in _TELLING if any(len({getattr(run, name) for run in alike}) > 1 for alike in seen.values())]


def _difference(run: Run, names: Sequence[str]) -> str:
    texts = [str(getattr(run, name)) if name in ("machine", "version", "data", "variant") else
            f"{name} {getattr(run, name)}" for name in names]  # fmt: skip
    return ", ".join(text for text in texts if text)


def representatives(groups: Sequence[Sequence[Run]]) -> list[tuple[str, Run]]:
    """Return a run of each setting with a name that distinguishes it, those with most workers first."""
    runs = [_middle([run for run in group if len(run.history) > 1] or group) for group in groups]
    varying = [name for name in _SHOWN if len({getattr(run, name) for run in runs}) > 1]
    shown = varying or ["strategy"]
    named = [(", ".join(_word(name, run) for name in shown if name != "servers" or run.servers), run) for run in runs]
    # Strategies at their largest size come first, because they are compared most.
    return sorted(named, key=lambda pair: (-pair[1].workers, -pair[1].batch_per_rank))


def _middle(runs: Sequence[Run]) -> Run:
    """Return the run of middle accuracy, else loss: the first one may have diverged."""
    accuracies = [_accuracy(run) for run in runs]
    values = [run.loss for run in runs] if None in accuracies else accuracies
    # Without a finite loss it has diverged, and comes last.
    order = sorted(range(len(runs)), key=lambda index: inf if (value := values[index]) is None else value)
    return runs[order[(len(runs) - 1) // 2]]


def _word(name: str, run: Run) -> str:
    value = getattr(run, name)
    if name in ("workers", "servers"):
        return counted(value, name[:-1])
    return f"batch {value}" if name == "batch_per_rank" else str(value)


def _figures(kind: _Kind, curves: Sequence[tuple[str, Run]]) -> list[Figure]:
    figures = []
    for word, attribute in _AXES:
        series = [
            drawn for color, (name, run) in enumerate(curves) for drawn in _series(kind, attribute, name, run, color)
        ]
        if series:
            figures.append(_figure(kind, word, series))
    return figures


def _series(kind: _Kind, attribute: str, name: str, run: Run, color: int) -> list[Series]:
    for field, suffix in ((kind.held_out, ""), (kind.training, " (on training samples)")):
        points = [(getattr(point, attribute), getattr(point, field)) for point in run.history]
        measured = [(x, y) for x, y in points if y is not None and (positive(y) or y == 0)]
        if len(measured) > 1:
            x, y = zip(*measured, strict=True)
            return [Series(label=f"{name}{suffix}", x=x, y=y, style="line", color=color, strategy=run.strategy)]
    return []


def _figure(kind: _Kind, word: str, series: Sequence[Series]) -> Figure:
    factor, unit = (100, " %") if kind.percent else (1, "")
    ends = [f"{curve.label} ends at {factor * curve.y[-1]:.3g}{unit}" for curve in series]
    label = "epoch" if word == "epochs" else "seconds of training"
    rows = [(curve.label, float(x), y) for curve in series for x, y in zip(curve.x, curve.y, strict=True)]
    columns = (
        Column(name="run"),
        Column(name=label, kind="number"),
        Column(name=kind.label, kind="percent" if kind.percent else "number"),
    )
    return Figure(
        name=f"{kind.name}-{word}",
        title=f"{kind.label.capitalize()} against {word}",
        alt=f"{kind.label} against {word}: {listed(ends, 8)}.",
        x_label=label,
        y_label=kind.label,
        series=series,
        table=Table(title=f"{kind.label.capitalize()} against {word}", columns=columns, rows=rows),
        y_percent=kind.percent,
    )
