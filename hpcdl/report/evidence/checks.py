"""Results of a study by numbers of nodes, and a verdict for each criterion of a template. Nothing is guessed.

A centre counts nodes, while the rest of the report counts workers. Of several points on the same number of nodes the
fastest counts: a base that left half a node idle would make every other point look better.

`met` and `not met` are decided by the records. `not shown` is an efficiency whose interval crosses the limit, or that
has none. `not measured` is everything that the records do not say.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.paths import quoted
from hpcdl.core.records.run_record import RunRecord
from hpcdl.core.statistics import Ratio, welch_log_ratio
from hpcdl.core.storage.lock import JOB_VARIABLES
from hpcdl.core.units import counted, format_seconds, listed, parse_list
from hpcdl.report.analysis.names import curve_names
from hpcdl.report.analysis.scaling import Curve, Point
from hpcdl.report.document import Interval, percent
from hpcdl.report.evidence.template import AccessTemplate, Criterion
from hpcdl.report.runs.run import EMULATED, Run, positive


@dataclass(frozen=True, kw_only=True)
class NodePoint:
    """The repeats at one number of nodes.

    `wall` are their wall times in seconds, empty if one is unknown. `speedup` and `efficiency` are relative to the
    smallest number of nodes, by the time that the template names; None if that time is unknown.
    """

    nodes: int
    runs: Sequence[Run]
    wall: Sequence[float]
    throughput: Interval | None
    speedup: Ratio | None
    efficiency: Ratio | None

    @property
    def first(self) -> Run:
        """Any of the repeats."""
        return self.runs[0]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One curve by nodes. `records` are those of its runs, by name, if there are any."""

    name: str
    curve: Curve
    points: Sequence[NodePoint]
    records: Mapping[str, RunRecord]

    @property
    def runs(self) -> list[Run]:
        """All runs behind the points."""
        return [run for point in self.points for run in point.runs]

    @property
    def emulated(self) -> bool:
        """Whether computing was a wait, so that nothing here measures an application."""
        return any(run.model.startswith(EMULATED) for run in self.runs)


def choose_curve(curves: Sequence[Curve], wanted: str = "") -> tuple[str, Curve]:
    """Return the curve of a document with its name: the only one, or the one called `wanted`.

    Raises UsageError if there are several and none is named, or none over workers.
    """
    able = [curve for curve in curves if curve.mode != "scale-up"]
    if not able:
        raise UsageError("no finished run over workers, so nothing to show a centre; hpcdl sweep --for makes a study")
    named: dict[str, Curve] = {}
    for name, curve in zip(curve_names(able), able, strict=True):
        # A weak and a strong curve may have the same name.
        named[f"{name}, {curve.mode}" if name in named else name] = curve
    if wanted:
        if wanted not in named:
            raise UnknownNameError("curve", wanted, named)
        return wanted, named[wanted]
    if len(named) > 1:
        raise UsageError(
            f"these runs are {len(named)} curves, and a centre asks for one: {listed(list(map(quoted, named)), 6)}; "
            f"choose with --curve {quoted(next(iter(named)))}"
        )
    return next(iter(named.items()))


def measure(name: str, curve: Curve, records: Mapping[str, RunRecord], time: str) -> Measured:
    """Return the curve by nodes. `time` is `total` or `steps` (template.py)."""
    groups: dict[int, list[Point]] = defaultdict(list)
    for point in curve.points:
        groups[point.first.nodes].append(point)
    fastest = {
        nodes: max(points, key=lambda point: point.throughput.mean).runs for nodes, points in sorted(groups.items())
    }
    base = next(iter(fastest))
    rates = {nodes: [_rate(run, records, time) for run in runs] for nodes, runs in fastest.items()}
    points = [_point(nodes, runs, records, rates[nodes], base, rates[base]) for nodes, runs in fastest.items()]
    used_records = {run.name: records[run.name] for runs in fastest.values() for run in runs if run.name in records}
    return Measured(name=name, curve=curve, points=points, records=used_records)


def _point(
    nodes: int,
    runs: Sequence[Run],
    records: Mapping[str, RunRecord],
    rates: Sequence[float | None],
    base: int,
    base_rates: Sequence[float | None],
) -> NodePoint:
    wall = [seconds for run in runs if (seconds := wall_seconds(run, records)) is not None]
    known_rates, known_base_rates = [rate for rate in rates if rate], [rate for rate in base_rates if rate]
    # Those that are known may be the fast ones, so one unknown repeat leaves the point open.
    all_known = len(known_rates) == len(rates) and len(known_base_rates) == len(base_rates)
    speedup = (
        welch_log_ratio(known_rates, known_base_rates)
        if all_known and nodes != base
        else _one(known_rates)
        if all_known
        else None
    )
    return NodePoint(
        nodes=nodes,
        runs=runs,
        wall=wall if len(wall) == len(runs) else (),
        throughput=Interval.of([run.images_per_second for run in runs]),
        speedup=speedup,
        efficiency=None if speedup is None else speedup.scaled(base / nodes),
    )


def _one(rates: Sequence[float]) -> Ratio:
    """Return the base relative to itself."""
    return Ratio(value=1.0, low=1.0, high=1.0, p_value=None, std=0.0, n=len(rates), n_base=len(rates))


def wall_seconds(run: Run, records: Mapping[str, RunRecord]) -> float | None:
    """Return seconds of the whole training, from the beginning of its first step to its end.

    Returns None if they are unknown, and for a resumed run, whose record has only those of its last part.
    """
    record = records.get(run.name)
    if not positive(run.seconds_total) or record is None or record.resumed_from_steps:
        return None
    return run.seconds_total


def _rate(run: Run, records: Mapping[str, RunRecord], time: str) -> float | None:
    """Return samples per second, by the steps alone or by the whole training; None if unknown."""
    if time == "steps":
        return run.images_per_second
    seconds, record = wall_seconds(run, records), records.get(run.name)
    if seconds is None or record is None or not record.steps or not record.global_batch:
        return None
    return record.steps * record.global_batch / seconds


def mean_wall(point: NodePoint) -> float | None:
    """Return the mean wall time of the repeats in seconds."""
    return statistics.fmean(point.wall) if point.wall else None


MET, NOT_MET, NOT_SHOWN, NOT_MEASURED = "met", "not met", "not shown", "not measured"
_DIRECTIVE = re.compile(r"^(#SBATCH|#PBS|#BSUB|# flux:) ", re.MULTILINE)
_SYNTHETIC = "synthetic:"
_OF_REAL_NODES = frozenset(
    ("node-counts", "efficiency", "repeats", "reaches-target", "wall-times", "ran-as-jobs", "on-machine")
)
"""Checks that an emulated study cannot meet, because its computing is a wait."""


@dataclass(frozen=True, kw_only=True)
class AttachedFile:
    """A file that the user added. `kind` is the template's name for it."""

    kind: str
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """The basis of the verdicts. `target` is the number of nodes to ask for, None if the user did not say.

    `script` is the batch script; `script_source` is its origin, or why there is none.
    """

    template: AccessTemplate
    measured: Measured
    target: int | None = None
    script: str = ""
    script_source: str = ""
    attached: Mapping[str, AttachedFile] = field(default_factory=dict)

    @property
    def points(self) -> list[NodePoint]:
        """The points up to the target."""
        return [point for point in self.measured.points if self.target is None or point.nodes <= self.target]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """A criterion with its verdict, and a text of what was measured."""

    criterion: Criterion
    verdict: str
    measured: str


_Answer = tuple[str, str]


def judge(case: Case) -> list[Judgement]:
    """Return a judgement for each criterion, in the template's order."""
    return [_finding(case, criterion) for criterion in case.template.criteria]


def _finding(case: Case, criterion: Criterion) -> Judgement:
    verdict, measured = _CHECKS[criterion.check](case, criterion)
    if case.measured.emulated and criterion.check in _OF_REAL_NODES and verdict != NOT_MEASURED:
        verdict, measured = NOT_MET, f"computing was emulated, so this is no measurement of an application: {measured}"
    return Judgement(criterion=criterion, verdict=verdict, measured=measured)


def _node_counts(case: Case, criterion: Criterion) -> _Answer:
    least = int(criterion.at_least or 0)
    unknown = [point.nodes for point in case.points if not all(run.hosts for run in point.runs)]
    summary = f"{counted(len(case.points), 'number')} of nodes: {_nodes(case.points)}"
    if unknown:
        return NOT_MEASURED, f"{summary}; the runs on {listed(list(map(str, unknown)))} do not name their hosts"
    return (MET if len(case.points) >= least else NOT_MET), summary


def _efficiency(case: Case, criterion: Criterion) -> _Answer:
    limit, larger_points = criterion.at_least or 0.0, case.points[1:]
    if (mode := case.measured.curve.mode) != case.template.mode:
        return NOT_MEASURED, f"these runs are {mode} scaling; the rule is about {case.template.mode} scaling"
    if not larger_points:
        return NOT_MEASURED, "one number of nodes alone; an efficiency is relative to a smaller one"
    efficiencies = {point.nodes: point.efficiency for point in larger_points if point.efficiency is not None}
    if len(efficiencies) < len(larger_points):
        return NOT_MEASURED, f"the {_TIME[case.template.time]} is not known of every run"
    summary = "; ".join(f"{counted(nodes, 'node')} {ratio_words(ratio)}" for nodes, ratio in efficiencies.items())
    # One size that is surely below the limit decides, whatever the others leave open.
    if any(ratio.high is not None and ratio.high < limit for ratio in efficiencies.values()):
        return NOT_MET, summary
    if all(ratio.low is not None and ratio.low >= limit for ratio in efficiencies.values()):
        return MET, summary
    once = any(ratio.low is None for ratio in efficiencies.values())
    why = "measured once, so without an interval" if once else f"the 95 % interval holds {percent(limit)}"
    return NOT_SHOWN, f"{summary}; {why}: repeat the runs"


_TIME = {"total": "wall time", "steps": "time of the steps"}


def ratio_words(ratio: Ratio) -> str:
    """Return a ratio as percent, with its interval: `81.2 % [78.0, 84.5 %]`."""
    if ratio.low is None or ratio.high is None:
        return f"{percent(ratio.value)} (no interval)"
    return f"{percent(ratio.value)} [{percent(ratio.low).removesuffix(' %')}, {percent(ratio.high)}]"


def _repeats(case: Case, criterion: Criterion) -> _Answer:
    fewest = min(len(point.runs) for point in case.points)
    summary = "; ".join(f"{counted(point.nodes, 'node')} {counted(len(point.runs), 'run')}" for point in case.points)
    return (MET if fewest >= (criterion.at_least or 0) else NOT_MET), summary


def _reaches_target(case: Case, criterion: Criterion) -> _Answer:
    most = max(point.nodes for point in case.measured.points)
    if case.target is None:
        return NOT_MEASURED, f"measured up to {counted(most, 'node')}; say what you ask for with --target NODES"
    return (MET if most >= case.target else NOT_MET), f"measured up to {most} of {counted(case.target, 'node')}"


def _same_input(case: Case, criterion: Criterion) -> _Answer:
    runs, records = case.measured.runs, case.measured.records
    if len({(run.model, run.data) for run in runs}) > 1:
        return NOT_MET, f"models and data: {listed(sorted({f'{run.model} on {run.data}' for run in runs}))}"
    sums = {records[run.name].data_checksum if run.name in records else "" for run in runs}
    if "" in sums:
        return NOT_MEASURED, f"{runs[0].data} by its name alone; not every record has a checksum of the data"
    if all(text.startswith(_SYNTHETIC) for text in sums):
        sums = {text.partition("#")[0] for text in sums}  # the rest is the seed, in which repeats differ
    summary = f"{runs[0].data}, checksum {listed(sorted(sums))}"
    return (MET if len(sums) == 1 else NOT_MET), summary


def _strong_scaling(case: Case, criterion: Criterion) -> _Answer:
    curve = case.measured.curve
    return (MET if curve.mode == "strong" else NOT_MET), f"{curve.mode} scaling, batch {curve.batch}"


def _wall_times(case: Case, criterion: Criterion) -> _Answer:
    wall_s = {point.nodes: mean for point in case.points if (mean := mean_wall(point)) is not None}
    if len(wall_s) < len(case.points):
        missing = [str(point.nodes) for point in case.points if point.nodes not in wall_s]
        return NOT_MEASURED, f"no wall time of every run on {listed(missing)} nodes (resumed, or measured elsewhere)"
    return MET, "; ".join(f"{counted(nodes, 'node')} {format_seconds(mean)}" for nodes, mean in wall_s.items())


def _ran_as_jobs(case: Case, criterion: Criterion) -> _Answer:
    runs = case.measured.runs
    jobs = {run.name: job for run in runs if (job := _job_of(case, run.name))}
    if len(jobs) < len(runs):
        return NOT_MEASURED, f"{len(jobs)} of {counted(len(runs), 'run')} name a job of Slurm, PBS, LSF or Flux"
    return MET, f"jobs {listed(sorted(set(jobs.values())), 6)}"


def _job_of(case: Case, name: str) -> str:
    environment = case.measured.records[name].environment if name in case.measured.records else {}
    return next((environment[key] for key in JOB_VARIABLES if environment.get(key)), "")


def _on_machine(case: Case, criterion: Criterion) -> _Answer:
    machines = sorted({run.machine for run in case.measured.runs})
    wanted = case.template.machine.casefold()
    if wanted and all(wanted in machine.casefold() for machine in machines):
        return MET, listed(machines)
    # Not `not met`: a record may hold a host's name, and another name does not prove another machine.
    return NOT_MEASURED, f"the records call the machine {listed(machines) or 'nothing'}; say which one that is"


def _batch_script(case: Case, criterion: Criterion) -> _Answer:
    if _DIRECTIVE.search(case.script):
        return MET, f"attached: {case.script_source}"
    return NOT_MEASURED, case.script_source or "no batch system here; write the document on a login node"


def _placement(case: Case, criterion: Criterion) -> _Answer:
    records = case.measured.records
    ranks = [rank for run in case.measured.runs if run.name in records for rank in records[run.name].rank_records]
    if not ranks or any(run.name not in records for run in case.measured.runs):
        return NOT_MEASURED, "not every run has a record of its ranks"
    if not all(rank.processors for rank in ranks):
        return NOT_MEASURED, "not every record says on which processors its ranks ran"
    counts = sorted({len(parse_list(rank.processors)) for rank in ranks})
    processors = " or ".join([*map(str, counts[:-1]), counted(counts[-1], "processor")])
    return MET, f"recorded: a rank on {processors} of its node"


def _gpu_utilisation(case: Case, criterion: Criterion) -> _Answer:
    if shares := utilisations(case):
        mean, least = percent(statistics.fmean(shares)), percent(min(shares))
        return MET, f"recorded: {mean} in the mean, {least} on the least busy GPU"
    if criterion.attachment:
        return _attached(case, criterion)
    return NOT_MEASURED, "not every record says how busy its ranks' GPUs were"


def utilisations(case: Case) -> list[float]:
    """Return the utilization of each worker's GPU in each run, 0 to 1; empty if that of any worker is unknown."""
    records = [case.measured.records.get(run.name) for run in case.measured.runs]
    ranks = [rank for record in records if record for rank in record.rank_records if rank.role == "worker"]
    shares = [rank.gpu_utilisation for rank in ranks if rank.gpu_utilisation is not None]
    return shares if all(records) and len(shares) == len(ranks) else []


def _attached(case: Case, criterion: Criterion) -> _Answer:
    attachment = case.attached.get(criterion.attachment)
    if attachment is None:
        return NOT_MEASURED, f"not recorded; attach it with --attach {criterion.attachment}=FILE"
    return MET, f"attached: {attachment.name}, {counted(len(attachment.text.splitlines()), 'line')}"


def _nodes(points: Iterable[NodePoint]) -> str:
    return ", ".join(str(point.nodes) for point in points)


_CHECKS: Mapping[str, Callable[[Case, Criterion], _Answer]] = {
    "node-counts": _node_counts,
    "efficiency": _efficiency,
    "repeats": _repeats,
    "reaches-target": _reaches_target,
    "same-input": _same_input,
    "strong-scaling": _strong_scaling,
    "wall-times": _wall_times,
    "ran-as-jobs": _ran_as_jobs,
    "on-machine": _on_machine,
    "batch-script": _batch_script,
    "placement": _placement,
    "gpu-utilisation": _gpu_utilisation,
    "attached": _attached,
}
