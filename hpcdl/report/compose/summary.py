"""The report in five lines that can be quoted, each with its numbers, and the next step."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from hpcdl.core.units import counted, format_seconds, listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.scaling import Curve, Point
from hpcdl.report.document import Bounds, Column, Interval, cell_text, percent
from hpcdl.report.runs.run import Run
from hpcdl.report.sections.inference import line as inference_line
from hpcdl.report.sections.learning import HELD_OUT, SPLITS, TRAINING, UNSTATED, final_accuracy
from hpcdl.report.sections.scaling import base_words
from hpcdl.report.sections.search import winner_line as search_line
from hpcdl.report.sections.tuning import winner_line

ONCE = "measured once, no interval"
TOO_FEW = "too few runs for an interval"
TOO_FAR = "its runs are too far apart for an interval"
_FEW = 3
"""Number of runs up to which an interval is wide because of their number alone."""
_PERCENT = Column(name="efficiency", kind="percent")
_KEPT = {"weak": "batch per worker", "strong": "global batch", "scale-up": "batch and workers"}
"""What each mode of scaling keeps fixed."""
_DOING = {
    "input": "waiting for input",
    "compute": "computing",
    "wait": "waiting for the slowest worker",
    "exposed_communication": "communication that computing does not hide",
    "update": "updating the weights",
}
"""The parts of a step in plain words."""
_REMEDIES = {
    "input": "`hpcdl bench input DATA` measures the input alone",
    "wait": "`hpcdl doctor --nodes all` compares the nodes",
    "exposed_communication": "a larger --batch-size exchanges less often, and `hpcdl trace RUN` shows more",
    "update": "`hpcdl trace RUN` shows the update beside the rest of a step",
}
"""What to do about the largest part of a step other than computing."""
_WORTH_A_LOOK = 0.1
"""Share of a step from which a part deserves attention."""


def summary(analysis: Analysis) -> list[str]:
    """Return the summary's lines: scaling, runs, throughput, use of time, accuracy and next step, then the rest."""
    rules = (_scaling, _what, _throughput, _time, _accuracy, _next) if analysis.runs else ()
    searched = [f"Search: {search_line(search)}." for search in analysis.searches]
    rate = Column.rate(analysis.counted)
    tuned = [f"Tuning: {winner_line(tuning, rate)}." for tuning in analysis.tunings]
    inferred = [f"Inference: {inference_line(analysis)}."] if analysis.inferences else []
    return [*searched, *(rule(analysis) for rule in rules), *inferred, *tuned]


def _what(analysis: Analysis) -> str:
    usable = [run for run in analysis.runs if run.usable]
    num_left_out = len(analysis.runs) - len(usable) + len(analysis.unreadable)
    shown = usable or analysis.runs  # a size that failed has not run
    models = listed(sorted({run.model for run in shown}))
    data = listed(sorted({run.data for run in shown if run.data}), 2)
    strategies = listed(sorted({run.strategy for run in shown}), 6)
    workers = sorted({run.workers for run in shown})
    span = f"{workers[0]:,} to {workers[-1]:,} workers" if len(workers) > 1 else counted(workers[0], "worker")
    nodes = max(run.nodes for run in shown)
    machines = listed(sorted({run.machine for run in shown if run.machine}), 3)
    where = f" of {machines}" if machines else ""
    size = f"{'up to ' if nodes > 1 else ''}{counted(nodes, 'node')}{where}"
    tail = f"; {counted(num_left_out, 'more run')} failed or cannot be used, listed below" if num_left_out else ""
    text = f"{counted(len(usable), 'run')} of {models}{f' on {data}' if data else ''}"
    return f"What ran: {text} by {strategies}, with {span}, on {size}{tail}."


def _throughput(analysis: Analysis) -> str:
    if not analysis.curves:
        return "Throughput: no usable measurement."
    points = ((curve, point) for curve in analysis.curves for point in curve.points)
    # By the median: one outlier must not choose the setting to quote.
    curve, point = max(points, key=lambda pair: statistics.median(run.images_per_second or 0.0 for run in pair[1].runs))
    wide = point.throughput.is_wide
    value = Interval(value=point.throughput.mean, half=None if wide else point.throughput.ci95)
    run, runs = point.first, point.throughput.n
    setting = f"{run.model} by {run.strategy} with {counted(run.workers, 'worker')} x batch {run.batch_per_rank:g}"
    setting += f" on {counted(point.n, 'thread')}" if curve.mode == "scale-up" else ""
    text = f"mean of {counted(runs, 'run')}, ± the 95 % interval" if runs > 1 else "one run"
    text = f"mean of {runs} runs: {TOO_FEW if runs <= _FEW else TOO_FAR}" if wide else text
    rate = Column.rate(analysis.counted)
    return f"Throughput: at best {cell_text(rate, value)} {rate.name} ({setting}; {text})."


def _scaling(analysis: Analysis) -> str:
    for mode, kept in _KEPT.items():
        curves = [curve for curve in analysis.curves if curve.mode == mode and not curve.alone]
        if curves:
            return f"Scaling: {_ends(curves)} ({mode} scaling: {kept} fixed; 100 % is ideal)."
    if len({run.workers for run in analysis.runs if run.usable}) > 1:
        return "Scaling: no efficiency, since no two sizes have the same other settings; the warnings say what differs."
    return "Scaling: all runs have the same size; run another --ranks to see an efficiency."


def _ends(curves: Sequence[Curve]) -> str:
    """Describe the best curve from the fewest workers first, as the main result, then the others briefly.

    A base of many workers has lost already what the first ones cost, so its efficiencies look better.
    """
    named = zip(curves, curve_names(curves), strict=True)
    ordered = sorted(named, key=lambda pair: (pair[0].base.n, -pair[0].points[-1].efficiency.value))
    curve, name = ordered[0]
    base, other_curves = base_words(curve), []
    for other, other_name in ordered[1:]:
        since = "" if base_words(other) == base else f", from {base_words(other)}"
        other_curves.append(f"{other_name} {_efficiency(other)} at {other.points[-1].n:,}{since}")
    text = f"{name} keeps {_efficiency(curve)} efficiency at {curve.points[-1].n:,} {curve.axis}, from {base}"
    return f"{text}; {listed(other_curves, 3)}" if other_curves else text


def _efficiency(curve: Curve) -> str:
    ratio = curve.points[-1].efficiency
    if ratio.low is None:
        return f"about {percent(ratio.value)} ({ONCE})"
    if ratio.is_wide:
        return f"about {percent(ratio.value)} ({TOO_FEW if min(ratio.n, ratio.n_base) <= _FEW else TOO_FAR})"
    return cell_text(_PERCENT, Bounds(value=ratio.value, low=ratio.low, high=ratio.high))


def _largest(analysis: Analysis) -> tuple[Point, Mapping[str, float]] | None:
    """Return the fastest point of most workers and its seconds by part; None if no run has parts."""
    measured = [(item.point, item.parts) for breakdowns in analysis.breakdowns for item in breakdowns]
    return max(measured, key=lambda pair: (pair[0].n, pair[0].throughput.mean), default=None)


def _next(analysis: Analysis) -> str:
    """Return the most useful next step: repeats, a part of the step, a run for the prediction, or more workers."""
    points = [point for curve in analysis.curves for point in curve.points]
    few = [point for point in points if point.throughput.n < _FEW]
    # Repeats come first: without intervals no other advice is sure.
    if few:
        have = "has" if len(few) == 1 else "have"
        return (
            f"Next: repeat the runs; {len(few)} of {counted(len(points), 'setting')} {have} fewer than {_FEW}, so that "
            "an interval is wide or missing."
        )
    if largest := _largest(analysis):
        total = sum(largest[1].values())
        name, seconds = max(((name, largest[1].get(name, 0.0)) for name in _REMEDIES), key=lambda item: item[1])
        if seconds > _WORTH_A_LOOK * total:
            return f"Next: {percent(seconds / total)} of a step is {_DOING[name]}; {_REMEDIES[name]}."
    for outlook in analysis.outlooks:
        if run := outlook.document.get("next_run"):
            return f"Next: `{run['command']}` improves the prediction most."
    return "Next: run it with more workers, and report both together."


def _time(analysis: Analysis) -> str:
    if (point_and_parts := _largest(analysis)) is None:
        return "Time: these runs do not say where the time of a step goes."
    point, parts = point_and_parts
    total = sum(parts.values())
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    largest = [(name, value) for name, value in ordered if value > 0]
    shares = [f"{percent(value / total)} {_DOING.get(name, name)}" for name, value in largest[:3]]
    rest_s = sum(value for _, value in largest[3:])
    shares += [f"{percent(rest_s / total)} the rest"] if rest_s > 0 else []
    run = point.first
    where = f"{run.strategy} with {counted(run.workers, 'worker')}"
    return f"Time: a training step ({where}) takes {format_seconds(total)}: {', '.join(shares)}."


def _accuracy(analysis: Analysis) -> str:
    best = _best(analysis)
    if best is None:
        return f"Accuracy: {_of_unfinished(analysis) or 'not evaluated in these runs'}."
    value, kind, runs, num_settings = best
    run = runs[0]
    epochs = f" after {run.history[-1].epoch:.3g} epoch{'s' * (run.history[-1].epoch != 1)}" if run.history else ""
    seconds = f" and {format_seconds(run.seconds_total)}" if run.seconds_total else ""
    text = f"{run.model} by {run.strategy} with {counted(run.workers, 'worker')}{epochs}{seconds}"
    several = f", the median of {len(runs)} runs of the setting" if len(runs) > 1 else ""
    highest = f", the highest of {num_settings} settings" if num_settings > 1 else ""
    return f"Accuracy: {percent(value)} {kind}{several} ({text}){highest}."


def _of_unfinished(analysis: Analysis) -> str:
    """Return the best last accuracy of runs that did not finish; empty if there is none, or one of a finished run."""
    found = [(final, run) for run in analysis.runs if (final := final_accuracy(run)) is not None]
    finished = {id(run) for runs in analysis.settings for run in runs}
    if not found or any(id(run) in finished for _, run in found):
        return ""
    (value, kind), run = max(found, key=lambda item: item[0][0])
    epoch = f"{run.history[-1].epoch:.3g}"
    return f"no finished run has one; {run.name} ({run.status}) had {percent(value)} {kind} by epoch {epoch}"


def accuracy_line(analysis: Analysis) -> str:
    """Return the accuracy alone, as printed at the end of the command."""
    best = _best(analysis)
    if best is None:
        return f"accuracy: {_of_unfinished(analysis) or 'not evaluated'}"
    value, kind, runs, _ = best
    run = runs[0]
    several = f", median of {len(runs)} runs" if len(runs) > 1 else ""
    where = f"{run.model}, {run.strategy}, {counted(run.workers, 'worker')}{several}"
    return f"{_ACCURACIES[kind]} accuracy: {100 * value:.2f} % ({where})"


_ACCURACIES = {TRAINING: "training", HELD_OUT: "held-out", SPLITS["val"]: "validation", SPLITS["test"]: "test"}
_ACCURACIES[UNSTATED] = "imported"


def _best(analysis: Analysis) -> tuple[float, str, Sequence[Run], int] | None:
    """Return the highest median final accuracy of a setting, the samples it was measured on, and the setting's runs.

    The last number is that of the settings it is the highest of.
    The best of all runs would improve by luck with the number of runs. Validation is preferred to test, whose samples
    are not meant for choosing, and both to training.
    """
    candidates: list[tuple[int, float, str, Sequence[Run]]] = []
    for runs in analysis.settings:
        finals = [final for run in runs if (final := final_accuracy(run)) is not None]
        kinds = {kind for _, kind in finals}
        # Accuracies on different samples have no common median.
        if len(kinds) == 1:
            (kind,) = kinds
            candidates.append((-_PREFERRED.index(kind), statistics.median(value for value, _ in finals), kind, runs))
    best = max(candidates, key=lambda item: item[:2], default=None)
    return None if best is None else (*best[1:], sum(item[0] == best[0] for item in candidates))


_PREFERRED = (SPLITS["val"], HELD_OUT, SPLITS["test"], UNSTATED, TRAINING)
