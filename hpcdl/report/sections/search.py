"""Searches for hyper-parameters: how the best grew, what mattered, what was tried, and how to train the winner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpcdl.core.units import counted
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.document import Cell, Column, Figure, Listing, Section, Series, Table, number
from hpcdl.report.runs.searches import SearchRecord, SearchTrial

MOST_LINES = 60
"""Maximum number of trials in a figure of parallel coordinates, which shows the best ones."""


def build(analysis: Analysis) -> Section | None:
    """Return the section, or None without a search among the report's inputs."""
    if not analysis.searches:
        return None
    lines, items = [], []
    for index, search in enumerate(analysis.searches):
        which = f"{search.name}: " if len(analysis.searches) > 1 else ""
        lines.append(f"{which}{winner_line(search)}.")
        items += _items(search, f"-{index + 1}" if index else "", which)
    return Section(name="search", title="Search for settings", lines=lines, items=items)


def winner_line(search: SearchRecord) -> str:
    """Return the result of the search as a sentence without its full stop."""
    states = Counter(trial.state for trial in search.trials)
    text = f"{counted(len(search.trials), 'trial')} by {search.sampler}"
    text += "".join(f", {states[state]} {state}" for state in ("stopped", "failed", "running") if states[state])
    if not search.front:
        return f"{text}; none finished"
    best = search.trial(search.front[0])
    values = ", ".join(f"{name} {number(value)}" for name, value in zip(search.objectives, best.values, strict=True))
    values += " (of the samples trained on)" if search.on_training else ""
    front = f" (first of {len(search.front)} that no other beats in all)" if len(search.front) > 1 else ""
    return f"{text}: at best {values}{front} with {_settings(best)}"


def _settings(trial: SearchTrial) -> str:
    return ", ".join(f"{key} {_setting_text(value)}" for key, value in trial.settings.items())


def _setting_text(value: object) -> str:
    return number(value) if isinstance(value, float) else str(value)


def _items(search: SearchRecord, suffix: str, which: str) -> list[Table | Figure | Listing]:
    items: list[Table | Figure | Listing] = []
    if search.commands:
        alt = "How to train with what was found."
        items.append(Listing(title=f"{which}The winner's command line", alt=alt, lines=list(search.commands)))
    if len(search.best_so_far()) > 1:
        items += [_growth(search, suffix, which, by) for by in ("time", "node-hours")]
    if search.importance:
        items.append(_importance(search, which))
    finished = [trial for trial in search.trials if trial.values]
    if len(finished) > 2 and len({key for trial in finished for key in trial.settings}) > 1:
        items.append(_parallel(search, finished, suffix, which))
    items.append(_trials(search, which))
    return items


def _growth(search: SearchRecord, suffix: str, which: str, by: str) -> Figure:
    """Plot the best of the first objective against the time of the search, or the node-hours of all trials so far."""
    steps = search.best_so_far()
    x = [_spent(search, trial, by) for trial, _ in steps]
    objective, label = search.objectives[0], "seconds of search" if by == "time" else "node-hours"
    columns = (
        Column(name=label, kind="number"),
        Column(name="trial", kind="count"),
        Column(name=objective, kind="number"),
    )
    rows: list[tuple[Cell, ...]] = [
        (spent, trial.number, value) for spent, (trial, value) in zip(x, steps, strict=True)
    ]
    return Figure(
        name=f"search-{by}{suffix}",
        title=f"{which}Best {objective} so far against {by}",
        alt=f"The best {objective} grew in {len(steps)} steps to {number(steps[-1][1])}.",
        x_label=label,
        y_label=f"best {objective} so far",
        series=[Series(label=f"best {objective}", x=x, y=[value for _, value in steps], style="line")],
        table=Table(title=f"Best {objective} so far against {by}", columns=columns, rows=rows),
        y_percent=objective == "accuracy",
    )


def _spent(search: SearchRecord, until: SearchTrial, by: str) -> float:
    end = until.ended_after_s or 0.0
    if by == "time":
        return end
    return sum(trial.node_hours or 0.0 for trial in search.trials if (trial.ended_after_s or 0.0) <= end)


def _importance(search: SearchRecord, which: str) -> Table:
    columns = (Column(name="setting"), Column(name="importance", kind="percent"))
    ordered = sorted(search.importance.items(), key=lambda item: -item[1])
    note = "The share of each setting in what the best trials have in common (PED-ANOVA: Watanabe et al., IJCAI 2023)."
    if doubt := search.importance_doubt:
        note += f" {doubt[0].upper()}{doubt[1:]}."
    return Table(title=f"{which}What mattered", columns=columns, rows=ordered, note=note)


def _parallel(search: SearchRecord, finished: Sequence[SearchTrial], suffix: str, which: str) -> Figure:
    """Plot each trial as a line over all settings, the objective last. Axes go from smallest to largest value."""
    upwards = search.directions[0] == "maximize"
    shown = sorted(finished, key=lambda trial: trial.values[0], reverse=upwards)[:MOST_LINES]
    keys = list(dict.fromkeys(key for trial in shown for key in trial.settings))
    positions = {key: _positions([trial.settings.get(key) for trial in shown]) for key in keys}
    values = _positions([trial.values[0] for trial in shown])
    axes = [*(f"{key}\n{_span([trial.settings.get(key) for trial in shown])}" for key in keys), search.objectives[0]]
    series = [
        Series(
            label=f"trial {trial.number}",
            x=axes,
            y=[*(positions[key][index] for key in keys), values[index]],
            style="coordinates",
            color=index,
        )
        for index, trial in enumerate(shown)
    ]
    return Figure(
        name=f"search-parallel{suffix}",
        title=f"{which}The {len(shown)} best trials, each a line; the darker, the better",
        alt=f"Parallel coordinates of {len(shown)} trials over {', '.join(keys)} and {search.objectives[0]}.",
        x_label="",
        y_label="smallest to largest",
        series=series,
        table=_trials(search, which),
    )


def _positions(values: Sequence[object]) -> list[float]:
    """Return each value's position between smallest and largest, by rank so that any scale fits; 0 without a value."""
    plain = [value if value is None or isinstance(value, int | float) else str(value) for value in values]
    numbers = sorted({value for value in plain if isinstance(value, int | float)})
    texts = sorted({value for value in plain if isinstance(value, str)})
    order: dict[object, int] = {value: position for position, value in enumerate([*numbers, *texts])}
    most = max(len(order) - 1, 1)
    return [order.get(value, 0) / most for value in plain]


def _span(values: Sequence[object]) -> str:
    numbers = sorted(value for value in values if isinstance(value, int | float))
    return f"{_setting_text(numbers[0])} to {_setting_text(numbers[-1])}" if numbers else ""


def _values(trial: SearchTrial, count: int) -> list[float | None]:
    return list(trial.values) if trial.values else [None] * count


def _trials(search: SearchRecord, which: str) -> Table:
    keys = list(dict.fromkeys(key for trial in search.trials for key in trial.settings))
    columns = (
        Column(name="trial", kind="count"), Column(name="state"),
        *(Column(name=name, kind="number") for name in search.objectives), *(Column(name=key) for key in keys),
        Column(name="seconds", kind="seconds"), Column(name="message"),
    )  # fmt: skip
    sign = -1 if search.directions[0] == "maximize" else 1
    ordered = sorted(search.trials, key=lambda item: (not item.values, sign * item.values[0] if item.values else 0))
    rows: list[tuple[Cell, ...]] = [
        (
            trial.number, trial.state, *_values(trial, len(search.objectives)),
            *(_setting_text(trial.settings[key]) if key in trial.settings else None for key in keys),
            trial.seconds, trial.message,
        )
        for trial in ordered
    ]  # fmt: skip
    return Table(title=f"{which}All trials, the best first", columns=columns, rows=rows)
