"""What a reader must know before believing the numbers: one line for each kind of caveat, with where it applies."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from hpcdl.core.records.run_record import FAILED, LOST, STOPPED, is_measured
from hpcdl.core.statistics import drift, outliers, welch_log_ratio
from hpcdl.core.units import counted, listed
from hpcdl.report.analysis.names import point_name
from hpcdl.report.analysis.scaling import Curve, Point, with_base_of
from hpcdl.report.analysis.settings import settings_of_runs, trifling_differences
from hpcdl.report.document import number
from hpcdl.report.runs.run import (
    EMULATED,
    FEW_STEPS,
    SLOW,
    Run,
    contradictions,
    few_steps,
    learned_apart,
    rates_in_order,
    slow_worker,
    unsteady,
)

UNFINISHED = "did not finish"


def caveats(runs: Sequence[Run], unreadable: Sequence[str], curves: Sequence[Curve]) -> list[str]:
    """Return every caveat of a study, the most serious first."""
    rules: tuple[Callable[[], Iterable[str]], ...] = (
        lambda: _unreadable(unreadable),
        lambda: _not_finished(runs),
        lambda: _impossible(runs),
        lambda: _contradicting(runs),
        lambda: _outliers(curves),
        lambda: _drifting(curves),
        lambda: _few_steps(runs),
        lambda: _unsteady(runs),
        lambda: _slow_workers(runs),
        lambda: _above_ideal(curves),
        lambda: _rising(curves),
        lambda: _stated_otherwise(curves),
        lambda: _emulated(runs),
        lambda: _mixed(runs, "machine", "machines"),
        lambda: _mixed(runs, "processor", "machines by processor"),
        lambda: _mixed(runs, "version", "versions"),
        lambda: _mixed([run for run in runs if run.mpi], "mpi", "MPI libraries"),
        lambda: _missing_base(curves, runs),
        lambda: _borrowed_base(curves),
        lambda: _single_measurements(curves),
        lambda: _learned_alike(runs),
        lambda: _diverged(runs),
        lambda: _lost(runs),
        lambda: _resumed(runs),
        lambda: _without_noise(curves),
        lambda: _uneven(curves),
        lambda: _changing(curves),
        lambda: trifling_differences([run for run in runs if run.usable]),
        lambda: _other_environments(runs),
        lambda: _own_warnings(runs),
    )
    return [line for rule in rules for line in rule()]


def _unreadable(unreadable: Sequence[str]) -> Iterable[str]:
    if unreadable:
        yield f"{counted(len(unreadable), 'record')} could not be read, left out: {listed(unreadable, 2)}"


def _not_finished(runs: Sequence[Run]) -> Iterable[str]:
    status_words = {FAILED: "failed", LOST: "was lost with its processes", STOPPED: "stopped early"}
    unfinished = [run for run in runs if not is_measured(run.status)]
    for word in (*status_words.values(), UNFINISHED):
        texts = [_unfinished_text(run) for run in unfinished if status_words.get(run.status, UNFINISHED) == word]
        if texts:
            yield f"{counted(len(texts), 'run')} {word}, left out of every mean: {listed(texts)}"


def _unfinished_text(run: Run) -> str:
    return f"{run.name} ({run.message})" if run.message else run.name


def _impossible(runs: Sequence[Run]) -> Iterable[str]:
    measured = [run for run in runs if is_measured(run.status) and not run.usable]
    absent = [run.name for run in measured if run.images_per_second is None]
    wrong = [run.name for run in measured if run.images_per_second is not None]
    if absent:
        yield f"{counted(len(absent), 'run')} without a throughput left out: {listed(absent)}"
    if wrong:
        yield f"zero or negative times or counts: {counted(len(wrong), 'run')} left out: {listed(wrong)}"
    # Its throughput is still a measurement: only the breakdown of its steps is lost.
    parts = [run.name for run in runs if run.usable and any(value < 0 for value in run.parts.values())]
    if parts:
        repeats = counted(len(parts), "run")
        yield f"negative part of a step in {repeats}, left out of the time breakdown: {listed(parts)}"


def _contradicting(runs: Sequence[Run]) -> Iterable[str]:
    if lines := contradictions(runs):
        records = "record contradicts itself" if len(lines) == 1 else "records contradict themselves"
        yield f"{len(lines)} {records}, kept in every mean; find out what changed it: {listed(lines, 3)}"


def _outliers(curves: Sequence[Curve]) -> Iterable[str]:
    """Report runs far from their repeats: they move a mean, and no interval of means shows it."""
    # By name, because a run may be on a weak and a strong curve.
    texts = {}
    for point in (point for curve in curves for point in curve.points):
        rates = [run.images_per_second or 0.0 for run in point.runs]
        for index in outliers(rates):
            text = f"{point.runs[index].name} {number(rates[index])}, median of its repeats {number(median(rates))}"
            texts[point.runs[index].name] = text
    if texts:
        yield (
            f"{counted(len(texts), 'run')} far off the repeats of the same setting, kept in every mean; look at them"
            f" before believing it: {listed(list(texts.values()), 3)}"
        )


def _drifting(curves: Sequence[Curve]) -> Iterable[str]:
    """Report repeats that become faster or slower in the order of measuring: they are not independent."""
    texts = [
        f"{curve.mode} {curve.first.strategy} {curve.first.model} {100 * change:+.0f} %"
        for curve in curves
        if (change := drift([rates_in_order(point.runs) for point in curve.points]))
    ]
    if texts:
        yield (
            "throughput drifts from the first to the last repeat of a setting, so something changed meanwhile, or a"
            f" table is sorted by speed; intervals assume neither: {listed(texts)}"
        )


def _few_steps(runs: Sequence[Run]) -> Iterable[str]:
    """Report throughputs of a few steps; runs without any after the warm-up have a warning of their own."""
    few = [run for run in runs if run.usable and few_steps(run) and (run.measured_steps or 0) > 0]
    if few:
        texts = [f"{run.name} {counted(run.measured_steps or 0, 'step')}" for run in few]
        yield (
            f"fewer than {FEW_STEPS} steps after the warm-up in {counted(len(few), 'run')}, kept in every mean; their"
            f" times may be chance, so train for more steps: {listed(texts, 3)}"
        )


def _unsteady(runs: Sequence[Run]) -> Iterable[str]:
    """Report runs whose steps changed meanwhile: their mean is of two speeds, and all repeats may have it alike."""
    if texts := [text for run in runs if (text := unsteady(run))]:
        yield (
            f"steps of {counted(len(texts), 'run')} changed their speed during the run (its first and last third), so"
            " that a mean depends on the number of steps; look for a longer warm-up, heat, or other programs:"
            f" {listed(texts, 3)}"
        )


def _slow_workers(runs: Sequence[Run]) -> Iterable[str]:
    """Report workers that compute much longer than the others, as on a slow node."""
    if texts := [text for run in runs if (text := slow_worker(run))]:
        yield (
            f"one worker computes {SLOW:g} times as long as the others or longer in {counted(len(texts), 'run')}, kept"
            " in every mean; `hpcdl trace RUN` shows the likely cause, `hpcdl doctor --nodes all` compares nodes:"
            f" {listed(texts, 3)}"
        )


_ROUNDING = 1.02


def _above_ideal(curves: Sequence[Curve]) -> Iterable[str]:
    points = [
        point_name(curve, point) for curve in curves for point in curve.points
        if (point.efficiency.low or 0.0) > 1 and point.efficiency.value > _ROUNDING
    ]  # fmt: skip
    if points:
        yield (
            "efficiency above 100 %: the base is slow for its size, most often because it had fewer servers or cores,"
            " because more workers' caches and memory hold what one's did not, or because its runs were disturbed:"
            f" {listed(points)}"
        )
    chance = [
        point_name(curve, point) for curve in curves for point in curve.points
        if point.efficiency.value > _ROUNDING and (point.efficiency.low or 0.0) <= 1
    ]  # fmt: skip
    if chance:
        yield (
            "efficiency above 100 % that may be chance, since its interval holds 100 % too, or is missing; repeat"
            f" these runs and their base: {listed(chance)}"
        )


_RISE = 1.15


def _rising(curves: Sequence[Curve]) -> Iterable[str]:
    """Report efficiencies that recover at a larger size: more workers alone do not make a step faster."""
    texts = []
    for curve in curves:
        for smaller, larger in itertools.pairwise(curve.points[1:]):
            rates = [[run.images_per_second or 0.0 for run in point.runs] for point in (larger, smaller)]
            rise = welch_log_ratio(*rates).scaled(smaller.n / larger.n)
            if rise.value > _RISE and (rise.low is None or rise.low > 1):
                ends = [f"{100 * point.efficiency.value:.1f} % at {point.n}" for point in (smaller, larger)]
                name = f"{curve.mode} {curve.first.strategy} {curve.first.model}"
                texts.append(f"{name} {ends[0]}, {ends[1]} {curve.axis}")
    if texts:
        yield (
            "efficiency rises again at a larger size, so that something else differs too (network, nodes, settings), or"
            f" the smaller size was disturbed; repeat both: {listed(texts, 3)}"
        )


_SAME_RATIO = 1.03
"""Factor by which a table's ratio may differ from the computed one: it is rounded, or of one run of several."""


def _stated_otherwise(curves: Sequence[Curve]) -> Iterable[str]:
    """Report efficiencies and speed-ups of a table that do not follow from its throughputs."""
    lines: dict[str, dict[frozenset[str], str]] = {}
    for measure in ("efficiency", "speedup"):
        for curve in curves:
            known = [(point, _stated(point, measure)) for point in curve.points]
            pairs = [(point, value) for point, value in known if value is not None]
            if len(pairs) > 1 and not curve.alone:
                names = frozenset(run.name for point, _ in pairs for run in point.runs)
                # A row may be on a weak and on a strong curve; its table means one of them.
                before = lines.setdefault(measure, {}).get(names)
                lines[measure][names] = "" if before == "" else _difference(curve, measure, pairs)
    yield from (line for by_runs in lines.values() for line in by_runs.values() if line)


def _stated(point: Point, measure: str) -> float | None:
    values = [run.stated[measure] for run in point.runs if measure in run.stated]
    return median(values) if values else None


def _difference(curve: Curve, measure: str, pairs: Sequence[tuple[Point, float]]) -> str:
    """Return how a table's ratios differ from the computed ones; empty if they hardly do."""
    texts = []
    for computed in (measure, *(("efficiency_per_node",) if measure == "efficiency" else ())):
        factors = [value / getattr(point, computed).value for point, value in pairs]
        if max(factors) < _SAME_RATIO * min(factors):
            # A speed-up from several workers is often given as if one had been ideal.
            usual = (1.0, float(curve.base.n)) if measure == "speedup" else (1.0,)
            if any(1 / _SAME_RATIO < factors[0] / one < _SAME_RATIO for one in usual):
                return ""
            texts.append(
                f"the table's {measure} is {factors[0]:.3g} x the report's at all sizes, so it has another base:"
                f" {point_name(curve, curve.base)} is the report's"
            )
        else:
            point, value = max(pairs, key=lambda pair: abs(math.log(pair[1] / getattr(pair[0], computed).value)))
            own = getattr(point, computed).value
            shown = [f"{100 * one:.1f} %" if measure == "efficiency" else f"{one:.2f}" for one in (value, own)]
            texts.append(
                f"the table's {measure} is {shown[0]} where its throughputs give {shown[1]}, which the report shows;"
                f" find out which is right: {point_name(curve, point)}"
            )
    return texts[0]


def _emulated(runs: Sequence[Run]) -> Iterable[str]:
    models = sorted({run.model for run in runs if run.usable and run.model.startswith(EMULATED)})
    if models:
        yield f"emulated computing: a wait in its place, so that the exchange alone is measured: {listed(models)}"


def _mixed(runs: Sequence[Run], name: str, plural: str) -> Iterable[str]:
    values = sorted({str(getattr(run, name)) or f"unknown {name}" for run in runs if run.usable})
    if len(values) > 1:
        yield f"mixed {plural}, never averaged with each other: {listed(values)}"


def _missing_base(curves: Sequence[Curve], runs: Sequence[Run]) -> Iterable[str]:
    # A curve of one size has no efficiency that could be relative to anything.
    bases = [point_name(curve, curve.base) for curve in curves if curve.base.n > 1 and len(curve.points) > 1]
    if bases:
        yield (
            "missing base: no measurement of one worker (or thread), efficiency is relative to the smallest size:"
            f" {listed(bases)}"
        )
    lent = {id(run) for curve in curves if curve.borrowed for run in curve.base.runs}
    lonely = [curve for curve in curves if curve.alone and id(curve.first) not in lent]
    if lonely:
        names = listed([point_name(curve, curve.base) for curve in lonely])
        yield f"one size alone, so no speed-up and no efficiency{_base_to_ask_for(lonely, runs)}: {names}"


_MOST_TRIED = 20
"""Curves for which another strategy's base is looked for."""


def _base_to_ask_for(lonely: Sequence[Curve], runs: Sequence[Run]) -> str:
    """Return a hint where one worker ran by another strategy alone, as by `single`: the report must not guess that."""
    larger = [curve for curve in lonely if curve.base.n > 1][:_MOST_TRIED]
    alone = dict.fromkeys(curve.first.strategy for curve in lonely if curve.first.workers == 1)
    for strategy in sorted(alone, key=lambda name: name != "single"):  # another may have servers
        if any(curve.borrowed for curve in with_base_of(larger, runs, strategy)):
            return f" (--base {strategy} makes its one worker the base of others)"
    return ""


def _borrowed_base(curves: Sequence[Curve]) -> Iterable[str]:
    points = [point_name(curve, curve.points[0]) for curve in curves if curve.borrowed]
    if points:
        strategy = next(curve.base.first.strategy for curve in curves if curve.borrowed)
        yield f"base of another strategy: efficiency is relative to one worker of {strategy}: {listed(points)}"


def _single_measurements(curves: Sequence[Curve]) -> Iterable[str]:
    points = _points_where(curves, lambda count: count == 1)
    if points:
        yield f"single measurement, without an interval (marked †) at {counted(len(points), 'point')}: {listed(points)}"


def _learned_alike(runs: Sequence[Run]) -> Iterable[str]:
    texts = [
        f"{counted(len(group), 'run')} of {group[0].strategy} {group[0].model} with"
        f" {counted(group[0].workers, 'worker')} as {counted(num_apart, 'measurement')}"
        for group in settings_of_runs(runs)
        if (num_apart := len(learned_apart(group))) < len(group)
    ]
    if texts:
        yield (
            "runs with the same seed learned exactly alike, and accuracy, loss and times to accuracy count them once;"
            f" give each run its own --seed: {listed(texts, 3)}"
        )


_LOST = 0.5


def _diverged(runs: Sequence[Run]) -> Iterable[str]:
    """Report runs that learned far less than their repeats, as where a seed diverged: a mean hides them."""
    texts = []
    for group in settings_of_runs(runs):
        finals = [(run.name, run.accuracy) for run in group if run.accuracy is not None]
        if len(finals) > 2:
            middle = median([value for _, value in finals])
            texts += [
                f"{name} {100 * value:.1f} %, median of its repeats {100 * middle:.1f} %"
                for name, value in finals
                if value < _LOST * middle
            ]
    if texts:
        yield (
            f"{counted(len(texts), 'run')} ended with less than half the accuracy of the repeats, kept in every mean;"
            f" the training may have diverged: {listed(texts, 3)}"
        )


_FAR_ABOVE = 3.0


def _lost(runs: Sequence[Run]) -> Iterable[str]:
    """Report runs without an accuracy whose loss is far above their repeats', or is no number, as with regressions.

    A loss below 0 has no such factor. Tables made elsewhere may lack losses, and emulated computing learns nothing.
    """
    texts = []
    for group in settings_of_runs(runs):
        losses = [run.loss for run in group if run.loss is not None]
        if len(group) < 3 or len(losses) < 2 or any(_without_loss(run) for run in group):
            continue
        middle = median(losses)
        texts += [
            f"{run.name} {'no finite number' if run.loss is None else f'{run.loss:.3g}'}, median {middle:.3g}"
            for run in group
            if run.loss is None or run.loss > _FAR_ABOVE * middle > 0
        ]
    if texts:
        yield (
            f"{counted(len(texts), 'run')} ended with a loss above {_FAR_ABOVE:g} x that of the repeats, or not finite,"
            f" kept in every mean; the training may have diverged: {listed(texts, 3)}"
        )


def _without_loss(run: Run) -> bool:
    return run.accuracy is not None or run.imported or run.model.startswith(EMULATED)


def _resumed(runs: Sequence[Run]) -> Iterable[str]:
    texts = [
        f"{run.name} (from step {run.resumed_from_steps[-1]})" for run in runs if run.usable and run.resumed_from_steps
    ]
    if texts:
        yield (
            f"{counted(len(texts), 'run')} resumed: throughput and parts of a step are of the steps since then alone;"
            " node-hours are of all its steps as if on its last nodes, without work that was lost:"
            f" {listed(texts)}"
        )


def _without_noise(curves: Sequence[Curve]) -> Iterable[str]:
    """Report equal repeats: clocks never agree to the last digit, so an interval of zero is not a measurement."""
    points = [
        point_name(curve, point) for curve in curves for point in curve.points
        if len(point.runs) > 1 and len({run.images_per_second for run in point.runs}) == 1
    ]  # fmt: skip
    if points:
        yield (
            f"repeats with exactly the same throughput at {counted(len(points), 'point')}: rounded numbers, or one"
            f" measurement entered more than once; ± 0 and what is decided by it mean nothing: {listed(points)}"
        )


def _uneven(curves: Sequence[Curve]) -> Iterable[str]:
    texts = []
    for curve in curves:
        counts = [len(point.runs) for point in curve.points]
        if len(set(counts)) > 1:
            texts.append(f"{point_name(curve, curve.base)} and above {min(counts)} to {max(counts)} runs")
    if texts:
        yield f"uneven repeats: points of one curve have different numbers of runs: {listed(texts)}"


def _changing(curves: Sequence[Curve]) -> Iterable[str]:
    """Report what changes along a curve besides the size: servers and settings may grow with it."""
    curves_by_name: dict[str, list[str]] = {}
    for curve in curves:
        for name, values in _values_along(curve):
            if len(values) > 1:
                where = f"{curve.mode} {curve.first.strategy} {curve.first.model}: {', '.join(map(str, values))}"
                curves_by_name.setdefault(name, []).append(where)
    for name, curve_names in curves_by_name.items():
        yield f"{name} change along a curve, so its size is not all that differs: {listed(curve_names)}"


def _values_along(curve: Curve) -> Iterable[tuple[str, list[object]]]:
    runs = [point.first for point in curve.points]
    # In scale-up the threads are n itself.
    if curve.mode != "scale-up":
        yield "threads per worker", list(dict.fromkeys(run.threads for run in runs if run.threads is not None))
        several = [run.ranks_per_node for run in runs if run.nodes > 1]
        yield "ranks per node", list(dict.fromkeys(several))
    yield "servers", list(dict.fromkeys(run.servers for run in runs))
    for key in curve.first.settings:
        yield f"settings of {key}", list(dict.fromkeys(run.settings.get(key) for run in runs))


_TUNED = re.compile(
    "(?!.*(UUID|_ID)$)(UCX|FI|CXI|NCCL|MPICH|MPIR_CVAR|DNNL|ONEDNN)_.*|TF_XLA_FLAGS|TF_ENABLE_ONEDNN.*|KMP_BLOCKTIME"
    "|OMPI_MCA_(btl|pml|mtl|coll|osc)(_.*)?"
)
"""Variables by which users tune a network or kernels. Launchers set others, which differ with every job."""
_SET_HERE = ("UCX_MEM_EVENTS",)


def _other_environments(runs: Sequence[Run]) -> Iterable[str]:
    """Report repeats that ran with different variables of a network or of kernels: they are no repeats."""
    texts: dict[str, set[str]] = {}
    for group in settings_of_runs([run for run in runs if not run.imported]):
        for name in set().union(*(run.environment for run in group)):
            values = {run.environment.get(name, "unset") for run in group}
            if len(values) > 1 and name not in _SET_HERE and _TUNED.fullmatch(name):
                texts.setdefault(name, set()).update(values)
    if texts:
        variables = [f"{name} ({', '.join(sorted(values))})" for name, values in sorted(texts.items())]
        yield f"repeats of a setting differ in variables of the environment, and are averaged: {listed(variables, 3)}"


def _own_warnings(runs: Sequence[Run]) -> Iterable[str]:
    runs_by_line: dict[str, list[str]] = {}
    for run in runs:
        for line in run.warnings:
            runs_by_line.setdefault(line, []).append(run.name)
    for line, names in list(runs_by_line.items())[:20]:
        yield f"{line} ({listed(names, 2)})"


def _points_where(curves: Sequence[Curve], test: Callable[[int], bool]) -> list[str]:
    return [point_name(curve, point) for curve in curves for point in curve.points if test(len(point.runs))]
