"""`hpcdl report`: the results of runs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.options import ImportFlag, JsonFlag
from hpcdl.cli.output import print_json, print_table, put, say, say_beside
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.paths import quoted
from hpcdl.core.progress import progress

if TYPE_CHECKING:
    from hpcdl.report.analysis.analyse import Analysis
    from hpcdl.report.runs.findings import TracedRun
    from hpcdl.report.runs.searches import SearchRecord, TunedNode
    from hpcdl.report.runs.sources import Gathered, Walk
    from hpcdl.study.access import AccessCase

ALL_FORMATS = "terminal,html,md,csv,json"

Runs = Annotated[
    list[Path] | None, typer.Argument(metavar="RUN...", help="Run directories, or folders of run directories.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Where the report goes. [RUN/report; report for several runs, or another user's]"
    ),
]
Formats = Annotated[str, typer.Option("--format", metavar="LIST", help="Forms of the report, by commas.")]
Baseline = Annotated[Path | None, typer.Option("--baseline", metavar="DIR", help="An earlier study to compare with.")]
FailOn = Annotated[
    float | None,
    typer.Option("--fail-on-regression", metavar="PCT", help="Exit 1 where more than this slower than the baseline."),
]
Base = Annotated[
    str,
    typer.Option("--base", metavar="STRATEGY", help="Base of curves without a point of one worker, such as single."),
]
Compare = Annotated[
    str,
    typer.Option("--compare", metavar="KEY", help="Compare machine, processor, version, mpi or a setting's values."),
]
Anonymous = Annotated[bool, typer.Option("--anonymous", help="Leave out hosts, users and paths.")]
HideData = Annotated[bool, typer.Option("--anonymous-data", help="With --anonymous: leave out data sets' names too.")]
Figures = Annotated[bool, typer.Option("--figures", help="Also write each figure as PNG and PDF.")]
FigureWidth = Annotated[
    str | None,
    typer.Option(
        "--figure-width", metavar="one|two|MM", help="With --figures: a paper's column, two columns, or millimetres."
    ),
]
Link = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="SIZE|FILE",
        help="Network bytes per second, such as 12.5GB, or a file of `bench allreduce`.",
    ),
]
For = Annotated[
    str | None,
    typer.Option("--for", metavar="TEMPLATE", help="Write what a centre asks for before it grants large jobs."),
]
Target = Annotated[
    int | None, typer.Option("--target", min=1, metavar="NODES", help="With --for: the nodes that you ask for.")
]
Curve = Annotated[str, typer.Option("--curve", metavar="NAME", help="With --for: which curve, if there are several.")]
Attach = Annotated[
    list[str] | None,
    typer.Option("--attach", metavar="KIND=FILE", help="With --for: a file that the centre asks for; may be repeated."),
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", epilog="Example: hpcdl report runs --out report")(report)


def report(
    runs: Runs = None,
    out: Out = None,
    formats: Formats = ALL_FORMATS,
    imported: ImportFlag = None,
    baseline: Baseline = None,
    fail_on_regression: FailOn = None,
    base: Base = "",
    compare: Compare = "",
    anonymous: Anonymous = False,
    anonymous_data: HideData = False,
    figures: Figures = False,
    figure_width: FigureWidth = None,
    link: Link = None,
    for_: For = None,
    target: Target = None,
    curve: Curve = "",
    attach: Attach = None,
    as_json: JsonFlag = False,
) -> None:
    """Make tables and figures of how runs trained and scaled.

    A page, tables and figures, with intervals and caveats.
    """
    from hpcdl.report.analysis.analyse import kept_apart
    from hpcdl.report.compose.build import compose, render
    from hpcdl.report.runs.sources import link_of, walk, without_copies

    centres = {"--target": target, "--curve": curve, "--attach": attach}
    if for_ is not None:
        flags = {
            "--baseline": baseline, "--fail-on-regression": fail_on_regression, "--base": base, "--compare": compare,
            "--anonymous": anonymous, "--anonymous-data": anonymous_data, "--figures": figures,
            "--figure-width": figure_width, "--link": link,
        }  # fmt: skip
        _refuse(flags, f"does not go with --for {for_}; leave it out, or write a report without --for")
        _evidence(for_, runs or [], imported, out, formats, centres, as_json)
        return
    _refuse(centres, "belongs to a centre's document; give --for TEMPLATE too")
    chosen = _formats(formats, as_json)
    walks = {path: walk(path) for path in runs or []}  # once: on a parallel file system that takes longest
    searches, runs = _searches(runs or [], anonymous, walks)
    tunings, runs = _tunings(runs, anonymous, walks)
    if not runs and not tunings and not searches and imported is None:
        raise UsageError("no runs named; type hpcdl report RUN... or hpcdl report --import csv FILE")
    _check_flags(fail_on_regression, baseline, anonymous=anonymous, anonymous_data=anonymous_data)
    inches, folder = _inches(figure_width, figures), _folder(out, runs, chosen)
    gather = functools.partial(_gather, anonymous=anonymous, hide_data=anonymous_data)
    rate = None if link is None else link_of(link)
    extras = {"tunings": tunings, "searches": searches, "base": base, "compare": compare, "name": baseline}
    earlier = None if baseline is None else gather([baseline], None, {})  # first: its name may be mistyped
    gathered = gather(runs, imported, walks)
    gathered, before = kept_apart(gathered, earlier and without_copies(earlier, gathered.runs, str(baseline)))
    analysis = _analysed(gathered, before, extras | {"link_bytes_per_second": rate}, anonymous=anonymous)
    document, bar = compose(analysis), progress("drawing", 1)
    written = render(document, folder, chosen, paper_figures=figures, figure_inches=inches, bar=bar)
    if as_json:
        print_json(document.data)
    _print_summary(analysis, [path for path in written if path.parent == folder], say if as_json else put)
    _fail_on(analysis, fail_on_regression)


def _analysed(gathered: Gathered, before: Gathered | None, given: dict[str, Any], *, anonymous: bool) -> Analysis:
    """Return the analysis; `given` are arguments of `analyse`, and under `name` the folder of the baseline."""
    from hpcdl.predict.outlook import outlooks
    from hpcdl.report.analysis.analyse import analyse
    from hpcdl.report.runs.published import load_references

    traced, name = _traced(gathered, anonymous), given.pop("name")
    return analyse(
        gathered,
        baseline=before,
        baseline_name="" if name is None else "baseline" if anonymous else str(name),
        references=load_references(),
        traced=traced,
        outlooks=outlooks(gathered.runs, traced),
        **given,
    )


def _refuse(flags: Mapping[str, object], why: str) -> None:
    """Raise UsageError for the first of `flags` that was given."""
    set_flags = [flag for flag, value in flags.items() if value]
    if set_flags:
        raise UsageError(f"{set_flags[0]} {why}")


def _evidence(
    name: str,
    runs: list[Path],
    imported: tuple[str, Path] | None,
    out: Path | None,
    formats: str,
    given: Mapping[str, Any],
    as_json: bool,
) -> None:
    """Write the document that a centre asks for; `given` are its own flags."""
    from hpcdl.report.analysis.analyse import kept_apart
    from hpcdl.report.evidence.checks import judge
    from hpcdl.report.evidence.document import check_evidence_place, compose_evidence, verdict_lines, write_evidence
    from hpcdl.report.evidence.template import find_template
    from hpcdl.study.access import access_case

    template = find_template(name)
    if not runs and imported is None:
        raise UsageError(f"no runs named; type hpcdl report RUN... --for {name}")
    chosen, folder = _evidence_formats(formats), out or Path(f"evidence-{template.name}")
    say_beside(folder, check_evidence_place(folder, chosen))
    gathered, _ = kept_apart(_gather(runs, imported, {}, anonymous=False, hide_data=False))
    access: AccessCase = access_case(
        template, runs, gathered, curve=given["--curve"], target=given["--target"], attached=given["--attach"] or ()
    )
    findings = judge(access.case)
    document = compose_evidence(access.case, findings, access.caveats, access.described)
    written = write_evidence(document, folder, chosen, access.case.script)
    if as_json:
        print_json(document.data)
    else:
        put(document.title)
        print_table(("criterion", "verdict", "measured"), verdict_lines(findings))
    pages = sorted((path for path in written if path.suffix != ".svg"), key=lambda path: path.suffix != ".html")
    (say if as_json else put)(f"document: {quoted(pages[0].resolve())}")


def _evidence_formats(formats: str) -> list[str]:
    from hpcdl.report.evidence.document import FORMATS

    chosen = [name.strip() for name in formats.split(",") if name.strip()]
    if formats == ALL_FORMATS:
        return [*FORMATS]
    for name in chosen:
        if name not in FORMATS:
            raise UsageError(
                f"--format {name}: a centre's document is written as {', '.join(FORMATS)}; choose of these"
            )
    return chosen


_COLUMNS_MM = {"one": 89.0, "two": 183.0}
"""Widths of a column, and of two, in the journals of Nature; those of IEEE and ACM differ by less than 5 mm."""
_LEAST_MM, _MOST_MM = 50.0, 400.0


def _inches(width: str | None, figures: bool) -> float | None:
    """Return the width of figures that are written as PNG and PDF. Raises UsageError if it is invalid."""
    if width is None:
        return None
    if not figures:
        raise UsageError("--figure-width is for PNG and PDF; add --figures")
    try:
        millimetres = _COLUMNS_MM.get(width) or float(width.removesuffix("mm"))
    except ValueError:
        millimetres = math.nan
    if not _LEAST_MM <= millimetres <= _MOST_MM:
        raise UsageError(
            f"--figure-width is {width!r}; type one, two, or {_LEAST_MM:g} to {_MOST_MM:g} millimetres, such as 120"
        )
    return millimetres / 25.4


def _folder(out: Path | None, runs: list[Path], formats: list[str]) -> Path:
    """Return the folder of the report. Raises UsageError, before any work, if it would replace foreign files."""
    from hpcdl.core.storage.disk import is_own
    from hpcdl.report.compose.build import check_place

    folder = out or (runs[0] / "report" if len(runs) == 1 and is_own(runs[0]) else Path("report"))
    say_beside(folder, check_place(folder, formats))
    return folder


def _print_summary(analysis: Analysis, pages: list[Path], log: Callable[[str], None]) -> None:
    from hpcdl.report.compose.summary import accuracy_line

    for path in [path for path in pages if path.suffix == ".html"] or pages[:1]:
        log(f"report: {quoted(path.resolve())}")
    if analysis.runs:
        log(accuracy_line(analysis))


def _check_flags(percent: float | None, baseline: Path | None, *, anonymous: bool, anonymous_data: bool) -> None:
    """Raise UsageError for a flag that needs another one."""
    if anonymous_data and not anonymous:
        raise UsageError("--anonymous-data goes with --anonymous; give both")
    if percent is not None and (baseline is None or not 0 <= percent < 100):
        raise UsageError("--fail-on-regression takes a percentage from 0 to 100, and needs --baseline DIR")


def _fail_on(analysis: Analysis, percent: float | None) -> None:
    """Raise HpcdlError if a setting is significantly slower than the baseline by more than `percent`, if given.

    Raises UsageError if nothing could be judged: a check that cannot fail must not look like a passed one.
    """
    from hpcdl.report.analysis.comparisons import regressions, why_unjudged

    if percent is None:
        return
    if why := why_unjudged(analysis.comparisons):
        raise UsageError(f"--fail-on-regression judged nothing: {why}")
    slower = regressions(analysis.comparisons, percent)
    if slower:
        first = slower[0]
        raise HpcdlError(
            f"{len(slower)} settings are more than {percent:g} % slower than the baseline;"
            f" the first: {first.where} at {100 * first.ratio.value:.1f} % of it; see the report"
        )


def _searches(paths: list[Path], anonymous: bool, walks: Mapping[Path, Walk]) -> tuple[list[SearchRecord], list[Path]]:
    """Return the searches of `hpcdl search` at or in `paths`, and the `paths` that hold runs, or no search."""
    from hpcdl.report.runs.anonymous import anonymised_searches
    from hpcdl.report.runs.searches import find_searches, read_search
    from hpcdl.report.runs.sources import holds_runs

    by_path = {path: find_searches(path, walks[path]) for path in paths}
    searches = [read_search(path) for path in dict.fromkeys(itertools.chain(*by_path.values()))]
    other_paths = [path for path in paths if not by_path[path] or holds_runs(walks[path])]
    return anonymised_searches(searches) if anonymous else searches, other_paths


def _formats(formats: str, as_json: bool) -> list[str]:
    from hpcdl.report.renderers import RENDERERS

    chosen = [name.strip() for name in formats.split(",") if name.strip()]
    for name in chosen:
        RENDERERS.entry(name)
    return [name for name in chosen if not (as_json and name == "terminal")]


def _gather(
    runs: list[Path],
    imported: tuple[str, Path] | None,
    walks: Mapping[Path, Walk],
    *,
    anonymous: bool,
    hide_data: bool,
) -> Gathered:
    from hpcdl.report.runs.anonymous import anonymised
    from hpcdl.report.runs.imported import gather_with

    gathered = gather_with(runs, imported, progress("reading records", 1), walks)
    return anonymised(gathered, hide_data=hide_data) if anonymous else gathered


def _traced(gathered: Gathered, anonymous: bool) -> list[TracedRun]:
    """Return the trace summaries of these runs."""
    from hpcdl.launch.traced import traced_runs
    from hpcdl.report.runs.anonymous import anonymised_traces

    traced = traced_runs(gathered.run_dirs, say)
    return anonymised_traces(traced) if anonymous else traced


def _tunings(paths: list[Path], anonymous: bool, walks: Mapping[Path, Walk]) -> tuple[list[TunedNode], list[Path]]:
    """Return the searches of `tune-threads` at or below `paths`, and the `paths` that hold runs, or nothing known."""
    from hpcdl.report.runs.anonymous import anonymised_tunings
    from hpcdl.report.runs.sources import holds_runs
    from hpcdl.tuning.findings import find_tunings, read_tuning

    by_path = {path: find_tunings(path, walks[path]) for path in paths}
    tunings = [read_tuning(path) for path in dict.fromkeys(itertools.chain(*by_path.values()))]
    other_paths = [path for path in paths if not by_path[path] or holds_runs(walks[path])]
    return anonymised_tunings(tunings) if anonymous else tunings, other_paths
