"""From an analysis to the files of a report: compose the document and render it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdl import __version__
from hpcdl.core.pages.page import CURVES
from hpcdl.core.progress import NullProgress, Progress
from hpcdl.core.storage.disk import (
    check_output_folder,
    check_outputs,
    is_output,
    make_output_folder,
    remove_empty,
    remove_output,
)
from hpcdl.core.storage.files import json_text, read_json, without_infinities, write_output
from hpcdl.core.units import listed
from hpcdl.report.analysis.analyse import Analysis
from hpcdl.report.analysis.scaling import Breakdown, Curve, scaling_rows
from hpcdl.report.compose.summary import summary
from hpcdl.report.document import Document, Figure, Section
from hpcdl.report.renderers import RENDERERS
from hpcdl.report.renderers.figures import save, svg
from hpcdl.report.sections import SECTIONS

SCHEMA = "hpcdl.report/1"
_LATE = ("html", "terminal")
PAGES = {"html": "report.html", "md": "report.md", "csv": "scaling.csv", "json": "report.json"}
"""File of each format; figures and tables are beside them."""
LISTING = ".hpcdl-report.json"
"""Name of the file that lists a report's files in a folder, for the next report that is written there."""
_TABLES = (("csv", "csv"), ("latex", "tex"))
"""Format and suffix of the files in tables/."""


def compose(analysis: Analysis) -> Document:
    """Return the document with the sections whose data exist."""
    rows = scaling_rows(analysis.curves, analysis.varying)
    lines = summary(analysis)
    sections = (SECTIONS.load(name)(analysis) for name in SECTIONS)
    models = {run.model for run in analysis.runs} or {tuning.model for tuning in analysis.tunings}
    models = models or {search.name for search in analysis.searches} or {item.model for item in analysis.inferences}
    return Document(
        title=f"{_subject(analysis)} report: {listed(sorted(models), 3)}",
        summary=lines,
        warnings=analysis.warnings,
        sections=with_own_colors([section for section in sections if section is not None]),
        data=without_infinities(_data(analysis, lines, rows)),
        rows=rows,
    )


def with_own_colors(sections: Sequence[Section]) -> list[Section]:
    """Return the sections with one color for each strategy in all their figures.

    A strategy's second curve in a figure gets the next free color, and so do curves without a strategy.
    """
    figures = [item for section in sections for item in section.items if isinstance(item, Figure)]
    order = list(dict.fromkeys(curve.strategy for figure in figures for curve in figure.series if curve.strategy))
    return [
        dataclasses.replace(
            section,
            items=[_colored(item, order) if isinstance(item, Figure) else item for item in section.items],
        )
        for section in sections
    ]


def _colored(figure: Figure, order: Sequence[str]) -> Figure:
    owners = {curve.color: curve.strategy for curve in figure.series if curve.style not in _WITHOUT_COLOR}
    if not any(owners.values()):
        return figure
    chosen: dict[int, int] = {}
    for color, strategy in owners.items():
        if strategy and (slot := order.index(strategy) % len(CURVES)) not in chosen.values():
            chosen[color] = slot
    free = (slot for slot in itertools.count() if slot not in chosen.values())
    for color in owners:
        if color not in chosen:
            chosen[color] = next(free)
    series = [dataclasses.replace(curve, color=chosen.get(curve.color, curve.color)) for curve in figure.series]
    return dataclasses.replace(figure, series=series)


_WITHOUT_COLOR = ("ideal", "stack", "coordinates")


def _subject(analysis: Analysis) -> str:
    if analysis.searches:
        return "Search"
    if analysis.runs:
        return "Training"
    return "Tuning" if analysis.tunings else "Inference"


def render(
    document: Document,
    folder: Path,
    formats: Sequence[str],
    *,
    paper_figures: bool = False,
    figure_inches: float | None = None,
    bar: Progress | None = None,
) -> list[Path]:
    """Write the document into `folder` in each of `formats` (names in RENDERERS).

    `figure_inches` is the width of PNG and PDF. The HTML page follows the other files, because it contains the
    drawings. The terminal output comes last. Files of an earlier report in the folder are removed if its listing names
    them. Returns the files in the order of writing.
    """
    # All places are checked before the first file is written, so that a refusal leaves no half of a report.
    check_place(folder, formats)
    ordered = [name for name in dict.fromkeys(formats) if name not in _LATE]
    late = [name for name in _LATE if name in formats]
    figure_forms = (("svg",) if "md" in formats else ()) + (("png", "pdf") if paper_figures else ())
    figures = document.figures() if figure_forms or "html" in formats else []
    check_outputs(folder / "figures" / f"{figure.name}.{form}" for figure in figures for form in figure_forms)
    names = document.tables()
    tables = [folder / "tables" / f"{name}.{end}" for form, end in _TABLES if form in formats for name in names]
    check_outputs(tables)
    if figures or {*formats} != {"terminal"}:
        make_output_folder(folder)
    if tables:
        make_output_folder(folder / "tables")
    paths: list[Path] = []
    for name in ordered:
        paths += RENDERERS.load(name)(document, folder, {})
    drawings = _drawn(figures, bar or NullProgress())
    if figure_forms and figures:
        make_output_folder(folder / "figures")
        width = {} if figure_inches is None else {"width_inches": figure_inches}
        paths += [
            path
            for figure in figures
            for path in save(figure, drawings[figure.name], folder / "figures", figure_forms, **width)
        ]
    for name in late:
        paths += RENDERERS.load(name)(document, folder, drawings)
    if paths:
        _replace_listing(folder, paths)
    return paths


def _replace_listing(folder: Path, paths: Sequence[Path]) -> None:
    """Remove files that an earlier report listed and this one has not written, and list the files of this one.

    Files that the user has changed stay, and so do all files if the listing itself has been changed.
    """
    written, listing = {str(path.relative_to(folder)) for path in paths}, folder / LISTING
    earlier = read_json(listing).get("files", []) if is_output(listing) else []
    for name in earlier:
        # Anyone may edit the listing: no name in it may lead out of the folder.
        if isinstance(name, str) and _OWN_NAME.fullmatch(name) and name not in written:
            remove_output(folder / name)
    for inner in {str(Path(name).parent) for name in earlier if isinstance(name, str)} & {"figures", "tables"}:
        remove_empty(folder / inner)
    write_output(listing, json_text({"files": sorted(written)}))


_OWN_NAME = re.compile(r"report\.\w+|scaling\.csv|(?:figures|tables)/[\w.-]+\.(?:svg|png|pdf|csv|tex)")


def check_place(folder: Path, formats: Sequence[str]) -> list[str]:
    """Return the names of others' files beside which a report in these formats would lie.

    Raises UsageError if it would overwrite such files, or lie in a data set.
    """
    if {*formats} <= {"terminal"}:
        return []
    others = check_output_folder(folder)
    pages = [name for form, name in PAGES.items() if form in formats]
    check_outputs(folder / name for name in (*pages, *([LISTING] if pages else [])))
    return others


def _drawn(figures: Sequence[Figure], bar: Progress) -> dict[str, str]:
    """Return the SVG of each figure, by its name."""
    drawings = {}
    with bar:
        for index, figure in enumerate(figures):
            bar.update(index / len(figures), figure.name)
            drawings[figure.name] = svg(figure)
    return drawings


def _data(analysis: Analysis, lines: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of report.json (docs/reference/report-json.md)."""
    return {
        "schema": SCHEMA,
        "hpcdl": __version__,
        "summary": list(lines),
        "warnings": list(analysis.warnings),
        "scaling": list(rows),
        "fits": [
            *(item.as_json() for item in analysis.fits),
            *(item.as_json() for item in analysis.communication if item.fit),
        ],
        "verdicts": [item.as_json() for item in analysis.comparisons],
        "parts": [
            _parts(curve, item)
            for curve, curve_breakdowns in zip(analysis.curves, analysis.breakdowns, strict=True)
            for item in curve_breakdowns
        ],
        "tuning": [tuning.as_json() for tuning in analysis.tunings],
        "search": [dataclasses.asdict(search) for search in analysis.searches],
        "prediction": [item.as_json() for item in analysis.outlooks],
        "inference": [item.as_json() for item in analysis.inferences],
        "traces": [dataclasses.asdict(run) for run in analysis.traced],
        "runs": [
            {"name": run.name, "status": run.status, "message": run.message, "usable": run.usable}
            for run in analysis.runs
        ],
    }


def _parts(curve: Curve, breakdown: Breakdown) -> dict[str, Any]:
    run = breakdown.point.first
    return {
        "mode": curve.mode,
        "strategy": run.strategy,
        "model": run.model,
        "n": breakdown.point.n,
        "servers": run.servers,
        "batch_per_rank": run.batch_per_rank,
        "runs": breakdown.num_runs,
        "seconds": dict(breakdown.parts),
        "imbalance_seconds": breakdown.imbalance_seconds,
        "lost_efficiency": dict(breakdown.lost),
    }
