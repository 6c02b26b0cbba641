"""The document for a centre: a verdict for each criterion, the scaling, the machine, the batch script."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hpcdl import __version__
from hpcdl.core.statistics import Ratio
from hpcdl.core.storage.disk import check_output_folder, check_outputs, make_output_folder
from hpcdl.core.storage.files import json_text, without_infinities, write_output
from hpcdl.core.units import counted, listed
from hpcdl.report.document import (
    Bounds,
    Cell,
    Column,
    Document,
    Figure,
    Interval,
    Listing,
    Section,
    Series,
    Table,
    percent,
)
from hpcdl.report.evidence.checks import MET, Case, Judgement, NodePoint, utilisations
from hpcdl.report.evidence.template import RuleSource
from hpcdl.report.renderers import html, markdown
from hpcdl.report.renderers.figures import save, svg

SCHEMA = "hpcdl.evidence/1"
FORMATS = ("html", "md", "json")
SCRIPT = "job.sh"
_MOST_LINES = 400
"""Maximum number of lines of an attached file in the document. The file itself is submitted beside it."""
_MOST_RANKS = 64
"""Maximum number of ranks whose placement the document lists. The record has all."""
_THREADS = ("OMP_", "KMP_", "TF_NUM_", "HPCDL_INTRA", "HPCDL_INTER", "SLURM_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES")
_UTILISATION = "gpu-utilisation"
_STYLE = "figure:has(pre){display:block;width:auto;margin-right:0}pre{white-space:pre-wrap}\n"
"""Scripts and addresses get the whole width, and are not cut on paper."""


def compose_evidence(
    case: Case, findings: Sequence[Judgement], caveats: Sequence[str], described: str = ""
) -> Document:
    """Return the document. `caveats` are those of the runs; `described` says how the strategy parallelizes."""
    measured, template = case.measured, case.template
    title = f"Scaling evidence for {template.title}"
    if measured.emulated:
        title = f"Emulated computing, no measurement of an application. {title}"
    met = sum(finding.verdict == MET for finding in findings)
    unmet = [f"{finding.criterion.check} {finding.verdict}" for finding in findings if finding.verdict != MET]
    summary = [
        f"{met} of {len(findings)} criteria met." + (f" Others: {'; '.join(unmet)}." if unmet else ""),
        "The rules are the centre's, in our words; each verdict names its source.",
    ]
    return Document(
        title=title,
        summary=summary,
        warnings=caveats,
        sections=[
            _criteria(case, findings),
            _scaling(case),
            _test_case(case, described),
            _machine(case),
            *_attachments(case),
            *_yours(case),
        ],
        data=without_infinities(_data(case, findings, caveats)),
    )


def _source_lines(number: int, source: RuleSource) -> list[str]:
    state = f"; the page is as of {source.state}" if source.state else ""
    note = f"; {source.note}" if source.note else ""
    return [f"{number}  {source.url}", f"   read on {source.read}{state}{note}"]


def _criteria(case: Case, findings: Sequence[Judgement]) -> Section:
    sources = list(dict.fromkeys(finding.criterion.source for finding in findings))
    rows = [
        (finding.criterion.says, finding.verdict, finding.measured, str(sources.index(finding.criterion.source) + 1))
        for finding in findings
    ]
    columns = tuple(Column(name=name) for name in ("criterion", "verdict", "measured", "source"))
    note = (
        "not shown: the 95 % interval of an efficiency holds the limit, or there is none. not measured: the records do"
        " not say."
    )
    lines = [] if case.target is None else [f"Asked for: jobs of {counted(case.target, 'node')}."]
    source_lines = [line for number, source in enumerate(sources, start=1) for line in _source_lines(number, source)]
    listing = Listing(
        title="Sources", alt="The pages that have the rules, and when they were read.", lines=source_lines
    )
    table = Table(title="Verdicts", columns=columns, rows=rows, note=note)
    return Section(name="criteria", title="Criteria", lines=lines, items=[table, listing])


_BASIS = {
    "total": "Speed-up and efficiency are by wall time, as the centre defines them: of the whole training, from the"
    " beginning of its first step to its end, with evaluation and checkpoints. Processes start before it.",
    "steps": "Speed-up and efficiency are by the time of training steps after warm-up, as the centre asks for the main"
    " loop: start-up, evaluation and checkpoints do not count.",
}


def _scaling(case: Case) -> Section:
    points, base = case.measured.points, case.measured.points[0]
    columns = (
        Column(name="nodes", kind="count"), Column(name="workers", kind="count"), Column(name="runs", kind="count"),
        Column(name="wall time", kind="seconds"), Column(name="step", kind="seconds"),
        Column.rate(base.first.counted), Column(name="speed-up", kind="number"),
        Column(name="efficiency", kind="percent"),
    )  # fmt: skip
    rows = [
        (
            point.nodes, point.first.workers, len(point.runs), Interval.of(point.wall),
            Interval.of(run.step_seconds for run in point.runs), point.throughput, _cell(point.speedup),
            _cell(point.efficiency),
        )
        for point in points
    ]  # fmt: skip
    note = (
        f"Base: {counted(base.nodes, 'node')}. Intervals are 95 %: Student's t over runs, ratios by Welch on"
        " logarithms; † measured once. Of several points on the same nodes the fastest is shown."
    )
    table = Table(title="Scaling by nodes", columns=columns, rows=rows, note=note)
    figures = [_speedup_figure(case, table), _efficiency_figure(case, table)] if _drawn(points) else []
    lines = [_BASIS[case.template.time]]
    return Section(name="scaling", title="Scaling", lines=lines, items=[table, *figures])


def _cell(ratio: Ratio | None) -> Cell:
    return None if ratio is None else Bounds(value=ratio.value, low=ratio.low, high=ratio.high, n=ratio.n)


def _drawn(points: Sequence[NodePoint]) -> list[NodePoint]:
    """Return the points of a figure; none if there is nothing to compare."""
    with_speedup = [point for point in points if point.speedup is not None]
    return with_speedup if len(with_speedup) > 1 else []


def _speedup_figure(case: Case, table: Table) -> Figure:
    points = _drawn(case.measured.points)
    base, last = points[0].nodes, points[-1].nodes
    ideal = Series(label="ideal", x=[base, last], y=[1.0, last / base], style="ideal")
    return Figure(
        name="evidence-speedup",
        title="Speed-up",
        alt=f"Speed-up against nodes, from {base} to {last}; the numbers are in the table.",
        x_label="nodes",
        y_label=f"speed-up over {counted(base, 'node')}",
        series=[_series(case, [point.speedup for point in points]), ideal],
        table=table,
        x_log=True,
        y_log=True,
        square=True,
    )


def _efficiency_figure(case: Case, table: Table) -> Figure:
    points = _drawn(case.measured.points)
    ends = [points[0].nodes, points[-1].nodes]
    limit = case.template.at_least("efficiency")
    lines = [Series(label="ideal", x=ends, y=[1.0, 1.0], style="ideal")]
    if limit is not None:
        lines = [Series(label=f"limit {percent(limit)}", x=ends, y=[limit, limit], style="ideal")]
    return Figure(
        name="evidence-efficiency",
        title="Efficiency",
        alt=f"Efficiency against nodes, from {ends[0]} to {ends[1]}; the numbers are in the table.",
        x_label="nodes",
        y_label="efficiency",
        series=[_series(case, [point.efficiency for point in points]), *lines],
        table=table,
        x_log=True,
        y_percent=True,
    )


def _series(case: Case, ratios: Sequence[Ratio | None]) -> Series:
    known_ratios = [ratio for ratio in ratios if ratio is not None]
    return Series(
        label=case.measured.name,
        x=[point.nodes for point in _drawn(case.measured.points)],
        y=[ratio.value for ratio in known_ratios],
        low=[ratio.low for ratio in known_ratios],
        high=[ratio.high for ratio in known_ratios],
        strategy=case.measured.curve.first.strategy,
    )


def _test_case(case: Case, described: str) -> Section:
    run, records = case.measured.points[-1].first, case.measured.records
    record = records.get(run.name)
    curve = case.measured.curve
    samples = None if record is None else record.num_samples
    rows = [
        ("software", "hpcdl: training of Keras models on TensorFlow over MPI"),
        ("network", run.model + (f", {record.parameters:,} parameters" if record and record.parameters else "")),
        ("data", run.data + (f", {samples:,} training samples" if samples else "")),
        ("scaling", f"{curve.mode}: batch {curve.batch}"),
        ("strategy", f"{run.strategy}. {described}".strip()),
        ("steps of a run", listed(sorted({str(item.steps) for item in records.values()})) or "not recorded"),
        ("waiting for input", _waiting(case.measured.points)),
    ]
    return Section(name="test-case", title="Software and test case", items=[_facts("What ran", rows)])


def _waiting(points: Iterable[NodePoint]) -> str:
    """Return by nodes the share of a step in which a rank waits for its batch, which is the visible cost of reading."""
    shares = []
    for point in points:
        pairs = [(run.parts["input"], sum(run.parts.values())) for run in point.runs if run.parts.get("input", -1) >= 0]
        share = Interval.of_ratio(pairs)
        shares += [] if share is None else [f"{counted(point.nodes, 'node')} {percent(share.value)} of a step"]
    return "; ".join(shares) or "not recorded"


def _facts(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    return Table(title=title, columns=(Column(name="what"), Column(name="value")), rows=rows)


def _machine(case: Case) -> Section:
    runs, records = case.measured.runs, list(case.measured.records.values())

    def every(values: Iterable[object], most: int = 12) -> str:
        return listed(list(dict.fromkeys(str(value) for value in values if value)), most) or "not recorded"

    names = dict.fromkeys(name for run in runs for name in run.software)
    software = {name: dict.fromkeys(run.software[name] for run in runs if name in run.software) for name in names}
    rows = [
        ("machine", every(run.machine for run in runs)),
        ("processor", every(run.processor for run in runs)),
        ("cores of a node", every(run.cores_per_node for run in runs)),
        ("hosts", every(host for run in runs for host in run.hosts)),
        ("ranks of a node", every(run.ranks_per_node for run in runs)),
        ("software", every((f"{name} {' or '.join(versions)}" for name, versions in software.items()), 20)),
        ("runs", every((record.started_at for record in records), 1) + f"; {counted(len(runs), 'run')}"),
    ]
    threads = [
        ("threads of a rank", every(run.threads for run in runs)),
        ("node profile", every(run.profile for run in runs)),
        ("environment", every((f"{key}={value}" for record in records for key, value in record.environment.items()
                               if key.startswith(_THREADS)), 20)),
        ("GPU utilisation", _gpu_utilisation(case)),
    ]  # fmt: skip
    items = [_facts("Machine and software", rows), _facts("Threads and placement", threads), *_placement(case)]
    return Section(name="machine", title="Machine", items=items)


def _gpu_utilisation(case: Case) -> str:
    if shares := utilisations(case):
        return f"{percent(statistics.fmean(shares))} of the training, in the mean over the workers of all runs"
    return "attached" if _UTILISATION in case.attached else "not recorded"


def _placement(case: Case) -> list[Table]:
    """Return a table with the placement of the ranks of one run on the most nodes."""
    name = case.points[-1].runs[0].name
    ranks = case.measured.records[name].rank_records if name in case.measured.records else ()
    if not ranks or not all(rank.processors for rank in ranks):
        return []
    rows = [(str(rank.rank), rank.host, rank.role, rank.processors) for rank in ranks[:_MOST_RANKS]]
    note = f"The first {_MOST_RANKS} of {len(ranks)} ranks." if len(ranks) > _MOST_RANKS else ""
    title = f"Processors on which the ranks of {name} might compute"
    columns = [Column(name=name) for name in ("rank", "host", "role", "processors")]
    return [Table(title=title, columns=columns, rows=rows, note=note)]


def _attachments(case: Case) -> list[Section]:
    listings = []
    if case.script:
        listings.append(_listing(f"{SCRIPT}: {case.script_source}", "The batch script", case.script))
    kinds = {kind.name: kind for kind in case.template.attachments}
    listings += [_listing(file.name, kinds[file.kind].says, file.text) for file in case.attached.values()]
    if not listings:
        return []
    return [Section(name="attachments", title="Attachments", items=listings)]


def _listing(title: str, says: str, text: str) -> Listing:
    lines = text.expandtabs().splitlines()
    num_more = len(lines) - _MOST_LINES
    more = [f"... and {num_more} more lines"] if num_more > 0 else []
    return Listing(title=title, alt=says, lines=[*lines[:_MOST_LINES], *more])


def _yours(case: Case) -> list[Section]:
    if not case.template.yours:
        return []
    lines = ["The centre also asks for these, and no record holds them:"]
    table = Table(title="To be added", columns=(Column(name="what"),), rows=[(line,) for line in case.template.yours])
    return [Section(name="yours", title="What you add", lines=lines, items=[table])]


def _data(case: Case, findings: Sequence[Judgement], caveats: Sequence[str]) -> dict[str, Any]:
    """Return the content of evidence.json (docs/reference/evidence.md)."""
    measured = case.measured
    return {
        "schema": SCHEMA,
        "hpcdl": __version__,
        "template": case.template.name,
        "curve": measured.name,
        "mode": measured.curve.mode,
        "time": case.template.time,
        "target_nodes": case.target,
        "emulated": measured.emulated,
        "criteria": [
            {
                "check": finding.criterion.check, "says": finding.criterion.says,
                "at_least": finding.criterion.at_least, "verdict": finding.verdict, "measured": finding.measured,
                "url": finding.criterion.source.url, "read": finding.criterion.source.read,
            }
            for finding in findings
        ],
        "scaling": [
            {
                "nodes": point.nodes, "workers": point.first.workers, "runs": len(point.runs),
                "wall_seconds": list(point.wall), "speedup": _numbers(point.speedup),
                "efficiency": _numbers(point.efficiency),
            }
            for point in measured.points
        ],
        "warnings": list(caveats),
    }  # fmt: skip


def _numbers(ratio: Ratio | None) -> dict[str, float | None] | None:
    return None if ratio is None else {"mean": ratio.value, "low": ratio.low, "high": ratio.high}


def check_evidence_place(folder: Path, formats: Sequence[str]) -> list[str]:
    """Return the names of others' files beside which the document would lie.

    Raises UsageError, before any work, if it would replace such files, or lie in a data set.
    """
    others = check_output_folder(folder)
    check_outputs(folder / name for name in (*(f"evidence.{form}" for form in formats), SCRIPT))
    return others


def write_evidence(document: Document, folder: Path, formats: Sequence[str], script: str) -> list[Path]:
    """Write the document into `folder` in each of `formats`, and the batch script beside it. Return the files."""
    check_evidence_place(folder, formats)
    make_output_folder(folder)
    drawings = {figure.name: svg(figure) for figure in document.figures()} if {*formats} & {"html", "md"} else {}
    paths: list[Path] = []
    if "md" in formats:
        if drawings:
            make_output_folder(folder / "figures")
        for figure in document.figures():
            paths += save(figure, drawings[figure.name], folder / "figures", ("svg",))
        paths.append(folder / "evidence.md")
        write_output(paths[-1], markdown.text_of(document))
    if "html" in formats:
        paths.append(folder / "evidence.html")
        write_output(paths[-1], html.page_of(document, drawings, _STYLE))
    if "json" in formats:
        paths.append(folder / "evidence.json")
        write_output(paths[-1], json_text(document.data))
    if script:
        paths.append(folder / SCRIPT)
        write_output(paths[-1], script)
    return paths


def verdict_lines(findings: Sequence[Judgement]) -> list[tuple[str, str, str]]:
    """Return check, verdict and what was measured, for a terminal."""
    return [(finding.criterion.check, finding.verdict, finding.measured) for finding in findings]
