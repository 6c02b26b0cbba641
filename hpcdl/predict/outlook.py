"""A report's forecasts for sizes that its runs have not reached, and forecasts as figures.

A report has no question, so it answers the usual one: two to sixteen times the largest measured size. It must be quick
for thousands of runs: of many settings it takes some, and names them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdl.config.forms import NONE
from hpcdl.core.errors import UsageError
from hpcdl.core.storage.disk import check_outputs, make_output_folder
from hpcdl.core.units import common_unit
from hpcdl.predict.answer import DEFAULT_REACH, Question, answer
from hpcdl.predict.evidence import TIMELINE_KNOWS
from hpcdl.predict.jobs import label_of
from hpcdl.report.analysis.settings import COSTLY
from hpcdl.report.renderers.figures import save, svg
from hpcdl.report.runs.findings import MeasuredRate, Outlook, TracedRun
from hpcdl.report.runs.run import Run
from hpcdl.report.sections.prediction import forecast_figure, is_bounded

MOST_SUBJECTS = 2
"""Maximum number of subjects in a report, because each takes about half a second."""
MOST_STRATEGIES = 4
MOST_SIZES = 4
"""Maximum number of sizes of a strategy: the smallest, and the largest ones."""


def outlooks(runs: Sequence[Run], traced: Sequence[TracedRun] = ()) -> list[Outlook]:
    """Return for each network on each kind of node, most runs first, its forecasts or the reason why there are none.

    `runs` have their distinguishing settings (report/analysis/settings.py); `traced` are those with traces.
    """
    groups: dict[Hashable, list[Run]] = defaultdict(list)
    for run in runs:
        if run.usable and run.global_batch > 0:
            groups[_kind(run)].append(run)
    kinds = sorted(groups.values(), key=len, reverse=True)
    names = _subjects([members[0] for members in kinds])
    reason = f"a report predicts {MOST_SUBJECTS} kinds of runs, those with most runs; hpcdl predict RUN... takes others"
    not_predicted = [Outlook(subject=name, left_out=reason) for name in names[MOST_SUBJECTS:]]

    asked = list(zip(names, kinds, strict=True))[:MOST_SUBJECTS]
    return [*(_outlook(name, members, traced) for name, members in asked), *not_predicted]


def _kind(run: Run) -> tuple[Any, ...]:
    settings = (item for item in run.settings.items() if item[0] in COSTLY - TIMELINE_KNOWS)
    return (run.model, run.data, run.machine, run.processor, *settings)


def _subjects(firsts: Sequence[Run]) -> list[str]:
    """Return a name for each kind: its network, and what else differs."""
    kinds = [_kind(run) for run in firsts]
    values = list(zip(*((str(item) for item in kind[:4]) for kind in kinds), strict=True))
    positions = [0, *(index for index in range(1, 4) if len(set(values[index])) > 1)] if kinds else []
    names = []
    for kind in kinds:
        settings = [f"{key} {value}" for key, value in kind[4:]]
        names.append(", ".join([*(str(kind[index]) for index in positions if kind[index]), *settings]))
    return names


def _outlook(subject: str, runs: Sequence[Run], traced: Sequence[TracedRun]) -> Outlook:
    taken, remark = _taken(runs)
    largest = max(run.nodes for run in taken)
    nodes = tuple(largest << power for power in range(1, DEFAULT_REACH.bit_length()))
    try:
        answered = answer(Question(nodes=nodes), taken, traced)
    except UsageError as error:
        return Outlook(subject=subject, left_out=str(error))
    counting = common_unit(run.counted for run in taken)
    return Outlook(
        subject=subject, document=answered.as_json(), measured=_measured(taken), counted=counting, left_out=remark
    )


def _taken(runs: Sequence[Run]) -> tuple[list[Run], str]:
    """Return those `runs` that forecasts use, and a text about the others."""
    taken, aside = list(runs), []
    if len({_setting(run) for run in runs}) <= MOST_STRATEGIES * MOST_SIZES:
        return taken, ""
    if len({run.global_batch for run in runs}) > 1:
        taken = _most_common(taken, lambda run: round(run.global_batch / run.workers))
        aside.append(f"{round(taken[0].global_batch / taken[0].workers)} samples per worker")
    taken = _most_common(taken, lambda run: run.threads)
    strategies = [name for name, _ in Counter(run.strategy for run in taken).most_common(MOST_STRATEGIES)]
    aside.append(f"the {len(strategies)} strategies and {MOST_SIZES} sizes of each that tell most")
    kept: list[Run] = []
    for strategy in strategies:
        strategy_runs = [run for run in taken if run.strategy == strategy]
        sizes = sorted({(run.nodes, run.workers) for run in strategy_runs})
        sizes_kept = {*sizes[:1], *sizes[1 - MOST_SIZES :]}
        kept += [run for run in strategy_runs if (run.nodes, run.workers) in sizes_kept]
    share = f"from {len(kept):,} of {len(runs):,} runs ({', '.join(aside)})"
    return kept, f"{share}; hpcdl predict RUN... takes all of them"


def _setting(run: Run) -> tuple[Hashable, ...]:
    timeline_settings = (item for item in run.settings.items() if item[0] in TIMELINE_KNOWS)
    return (run.strategy, run.nodes, run.workers, run.servers, run.global_batch, run.threads, *timeline_settings)


def _most_common(runs: Sequence[Run], key: Callable[[Run], Hashable]) -> list[Run]:
    commonest = Counter(map(key, runs)).most_common(1)[0][0]
    return [run for run in runs if key(run) == commonest]


def _measured(runs: Sequence[Run]) -> list[MeasuredRate]:
    rates: dict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for run in runs:
        label = label_of(run.strategy, run.config.get("compress", NONE))
        rates[label, run.nodes, run.workers, run.global_batch].append(run.images_per_second or 0.0)
    return [
        MeasuredRate(
            strategy=strategy, nodes=nodes, workers=workers, batch_per_rank=batch / workers,
            images_per_second=sum(values) / len(values),
        )
        for (strategy, nodes, workers, batch), values in sorted(rates.items())
    ]  # fmt: skip


def draw(predictions: Sequence[Mapping[str, Any]], folder: Path, counted: str) -> list[Path]:
    """Write efficiency and throughput against nodes, a pair for each network, as SVG files into `folder`.

    Networks of which the runs bound no step get none.

    `predictions` are rows of an answer's document; `counted` is the unit of their throughputs.
    """
    make_output_folder(folder)
    figures = []
    for model in dict.fromkeys(row["model"] for row in predictions):
        rows = [row for row in predictions if row["model"] == model]
        if not any(map(is_bounded, rows)):
            continue  # a figure without a point
        for measure in ("efficiency", "throughput"):
            name = re.sub(r"[^\w.-]", "-", model)  # a user's own model is a path
            figures.append(forecast_figure(f"{name}-{measure}", measure, rows, counted))
    check_outputs(folder / f"{figure.name}.svg" for figure in figures)
    return [path for figure in figures for path in save(figure, svg(figure), folder, ["svg"])]
