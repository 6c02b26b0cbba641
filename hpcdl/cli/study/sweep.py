"""`hpcdl sweep`: run a study, every combination of a matrix with repeats, and survive failures during it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.options import (
    JsonFlag,
    MachineFlag,
    NetworkFlag,
    QuietFlag,
    SetFlag,
    print_settings_of_files,
    takes_settings,
)
from hpcdl.cli.output import Commentary, print_json, print_table, put, say
from hpcdl.config.study import Study, StudyConfig, load_study
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.paths import typed
from hpcdl.core.units import NOT_BOUNDED, counted, format_seconds, format_seconds_interval

if TYPE_CHECKING:
    from hpcdl.predict.forecast import Range
    from hpcdl.report.runs.sources import Gathered
    from hpcdl.study.cost import PointCost, StudyCost, StudyEstimate
    from hpcdl.study.plan import StudyRuns
    from hpcdl.study.state import StudyState
    from hpcdl.study.sweep import News

COLUMNS = (
    "run", "model", "data", "strategy", "nodes", "ranks", "workers", "servers", "threads", "batch", "settings", "time",
    "state",
)  # fmt: skip
StudyFile = Annotated[Path | None, typer.Argument(metavar="STUDY.toml", help="The study; flags override it.")]
Small = Annotated[bool, typer.Option("--small", help="The study's small version: its table [small].")]
Axis = Annotated[
    list[str] | None,
    typer.Option("--axis", metavar="KEY=V,V", help="Values of any setting of hpcdl train; may be repeated."),
]
Zip = Annotated[
    list[str] | None, typer.Option("--zip", metavar="KEY,KEY", help="Axes that advance together; may be repeated.")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the study whose folder is --out; finished runs are kept.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the runs and estimate their time; start none.")]
Predict = Annotated[
    bool, typer.Option("--predict", help="Say what the study will cost, by earlier runs or by facts; start none.")
]
Earlier = Annotated[
    list[Path] | None,
    typer.Option("--evidence", metavar="RUN", help="With --predict: earlier runs; may be repeated. [the study's own]"),
]
Jobs = Annotated[bool, typer.Option("--jobs", help="Submit a batch job for each number of nodes, and return.")]
Time = Annotated[str | None, typer.Option("--time", metavar="TIME", help="With --jobs: the time limit of each. [1h]")]
Partition = Annotated[str | None, typer.Option("--partition", metavar="NAME", help="With --jobs: partition or queue.")]
Account = Annotated[str | None, typer.Option("--account", metavar="NAME", help="With --jobs: account that pays.")]
OnlyNodes = Annotated[
    int | None, typer.Option("--only-nodes", min=1, metavar="N", help="Only the points that need N nodes.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder of the study. [studies/NAME]")]
For = Annotated[
    str | None,
    typer.Option(
        "--for", metavar="TEMPLATE", help="Write the study's file that a centre's evidence needs; start none."
    ),
]
Target = Annotated[
    int | None, typer.Option("--target", min=1, metavar="NODES", help="With --for: the nodes that you will ask for.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: hpcdl sweep study.toml --dry-run")(sweep)


@takes_settings(StudyConfig)
def sweep(
    flags: dict[str, Any],
    study: StudyFile = None,
    small: Small = False,
    dry_run: DryRun = False,
    predict: Predict = False,
    evidence: Earlier = None,
    network: NetworkFlag = None,
    machine: MachineFlag = None,
    resume: Resume = False,
    jobs: Jobs = False,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    only_nodes: OnlyNodes = None,
    out: Out = None,
    for_: For = None,
    target: Target = None,
    axis: Axis = None,
    zip_: Zip = None,
    set_: SetFlag = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> None:
    """Run a study: a matrix of repeated runs.

    Every combination of its lists, in random order, each run a fresh `hpcdl train`.
    """
    from hpcdl.study.state import new_state, open_study

    if for_ is not None:
        other_flags = {
            "--small": small, "--dry-run": dry_run, "--predict": predict, "--resume": resume, "--jobs": jobs,
            "--out": out, "--only-nodes": only_nodes, "--time": time, "--partition": partition, "--account": account,
            "--evidence": evidence, "--network": network, "--machine": machine,
        }  # fmt: skip
        _write_access_study(for_, target, other_flags, {"path": study, "flags": flags, "pairs": set_},
                            {"axes": axis or (), "zipped": zip_ or ()}, json)  # fmt: skip
        return
    if target is not None:
        raise UsageError("--target belongs to a centre's evidence; give --for TEMPLATE too")
    wanted = load_study(study, flags, set_, small=small, axes=axis or (), zipped=zip_ or ())
    plan, run_plan = _planned(wanted, only_nodes)
    folder = out or Path("studies") / wanted.name
    if predict:
        _predict(folder, wanted, plan, run_plan, {"evidence": evidence, "network": network, "machine": machine}, json)
        return
    _refuse_without_predict({"--evidence": evidence, "--network": network, "--machine": machine})
    if jobs and not dry_run:
        _submit(folder, wanted, plan, {"time": time, "partition": partition, "account": account}, resume, json)
        return
    # With --jobs each part has a folder and a state of its own.
    state = new_state(wanted, plan) if jobs else open_study(folder, wanted, plan, resume=resume)
    if dry_run:
        _show_plan(wanted, plan, state, run_plan, json)
        return
    commentary = Commentary(quiet=quiet)
    for line in (*plan.remarks, *plan.left_out):
        commentary.say(line)
    _run(folder, wanted, plan, state, commentary, json)


def _planned(study: Study, only_nodes: int | None) -> tuple[StudyRuns, Any]:
    from hpcdl.study.plan import make_plan
    from hpcdl.study.points import prepare_points

    plan, run_plan = prepare_points(study, make_plan(study))
    return plan if only_nodes is None else plan.only_nodes(only_nodes), run_plan


def _refuse_without_predict(flags: Mapping[str, object]) -> None:
    for flag, value in flags.items():
        if value:
            raise UsageError(f"{flag} says what a cost is predicted from; give --predict too")


def _write_access_study(
    name: str,
    target: int | None,
    others: Mapping[str, object],
    given: dict[str, Any],
    matrix: dict[str, Any],
    json: bool,
) -> None:
    """Write the file of the study that a centre's template needs, and print the next commands."""
    from hpcdl.report.evidence.template import find_template
    from hpcdl.study.access import access_study, write_study

    template = find_template(name)
    wrong = [flag for flag, value in others.items() if value]
    if wrong:
        raise UsageError(f"{wrong[0]}: --for {name} writes the study's file and runs nothing; leave {wrong[0]} out")
    study, plan = access_study(template, target, **given, **matrix)
    path = write_study(study, template, target)
    if json:
        print_json({"study": str(path), "name": study.name, "nodes": plan.node_counts, "runs": len(plan.runs)})
    else:
        nodes = ", ".join(map(str, plan.node_counts))
        put(f"{path}: {len(plan.runs)} runs on {nodes} nodes, {study.plan.repeats} of each point")
    for line in (*plan.remarks, *plan.left_out):
        say(line)
    folder, asked = Path("studies") / study.name, [] if target is None else ["--target", target]
    say(f"next: {typed('sweep', path, '--jobs')}; then {typed('report', folder, '--for', name, *asked)}")


def _run(folder: Path, study: Study, plan: StudyRuns, state: StudyState, commentary: Commentary, json: bool) -> None:
    from hpcdl.study.jobs import find_allocation, seconds_for_runs
    from hpcdl.study.sweep import Sweep, raise_for

    allocation = find_allocation(os.environ, plan.node_counts)
    with commentary.progress(study.name, len(plan.runs)) as bar:
        follow = functools.partial(_follow, bar, commentary)
        sweep = Sweep(folder, study, plan, state, allocation, follow, seconds_for_runs(os.environ))
        state = sweep.run()
    if json:
        print_json({"folder": str(folder), **dataclasses.asdict(state)})
    else:
        put(f"{folder}: {state.count('finished')} of {len(state.runs)} runs finished")
    commentary.say(f"next: {typed('report', folder, '--out', folder / 'report')}")
    raise_for(state, folder)


def _submit(
    folder: Path, study: Study, plan: StudyRuns, given: dict[str, str | None], resume: bool, json: bool
) -> None:
    from hpcdl.cluster.batch.submission import resources_of
    from hpcdl.config.commands import BATCH_KEYS, SubmitConfig, load_submit
    from hpcdl.study.jobs import JobLimits, submit_parts

    settings = load_submit(given)
    print_settings_of_files(SubmitConfig, settings, BATCH_KEYS)
    asked = settings.config
    limits = JobLimits(
        time_s=asked.job.time,
        partition=asked.batch.partition,
        account=asked.batch.account,
        nodes_wanted=resources_of(asked.batch),
    )
    for line in (*plan.remarks, *plan.left_out):
        say(line)
    parts = submit_parts(folder, study, plan, limits, resume=resume)
    if json:
        print_json({"folder": str(folder), "jobs": [dataclasses.asdict(part) for part in parts]})
    else:
        rows = [
            [str(part.nodes), str(part.runs), str(part.finished), str(part.failed), part.job, part.state]
            for part in parts
        ]
        print_table(("nodes", "runs", "finished", "failed", "job", "state"), rows)
    left = [part for part in parts if part.finished < part.runs]
    report = typed("report", folder, "--out", folder / "report")
    say(f"next: hpcdl jobs; when they have ended, {report}" if left else f"next: {report}")


def _follow(bar: Any, commentary: Commentary, news: News) -> None:
    done = news.state.count("finished") + news.state.count("failed")
    bar.update(done, f"{done} of {len(news.state.runs)}  {' '.join(news.running)}")
    if news.line:
        commentary.say(f"[{done}/{len(news.state.runs)}] {news.line}")


def _show_plan(study: Study, plan: StudyRuns, state: StudyState, run_plan: Any, json: bool) -> None:
    from hpcdl.node.machines import read_topology
    from hpcdl.study.cost import estimate_study
    from hpcdl.study.jobs import find_allocation

    num_cores, nodes = len(read_topology().usable_cores), _num_nodes(find_allocation, plan)
    estimate = estimate_study(study, plan, run_plan, num_cores, nodes, state)
    if json:
        print_json(_plan_document(study, plan, state, estimate))
        return
    print_table(
        COLUMNS,
        [
            [run.name, run.point.model, run.point.data, run.point.strategy, str(run.point.nodes), str(run.point.ranks),
             str(run.point.workers), str(run.point.servers), str(run.point.threads or ""), str(run.point.batch_size),
             run.point.listed_settings, _time(estimate.seconds_by_run.get(run.name)), state.run(run.name).status]
            for run in plan.runs
        ],
    )  # fmt: skip
    for line in (*plan.remarks, *plan.left_out):
        say(line)
    for line in _sentences(study, plan, estimate, num_cores, nodes):
        put(line)
    say("next: the same command without --dry-run")


def _predict(folder: Path, study: Study, plan: StudyRuns, run_plan: Any, given: Mapping[str, Any], json: bool) -> None:
    """Print the cost and write nothing; a study that has begun counts only its remaining runs."""
    from hpcdl.launch.traced import traced_runs
    from hpcdl.predict.network import read_network
    from hpcdl.study.cost import Known, predict_cost
    from hpcdl.study.state import FILE_NAME, new_state, open_study

    begun = (folder / FILE_NAME).exists()
    state = open_study(folder, study, plan, resume=True) if begun else new_state(study, plan)
    earlier = _earlier(folder, given["evidence"])
    known = Known(
        runs=earlier.runs,
        traced=traced_runs(earlier.run_dirs, say),
        network=None if given["network"] is None else read_network(given["network"]),
        machine=given["machine"],
    )
    cost = predict_cost(study, plan, run_plan, state, known)
    if json:
        print_json({"study": study.name, **cost.as_json()})
        return
    for line in (*plan.remarks, *plan.left_out):
        say(line)
    print_table(
        ("runs", "strategy", "nodes", "workers", "batch", "step", "90 %", "a run", "90 %", "node-h", "model"),
        [_cost_cells(point) for point in cost.points if point.runs],
    )
    _print_total(cost)
    say(f"next: the same command {'with --resume in place of' if begun else 'without'} --predict")


def _earlier(folder: Path, paths: list[Path] | None) -> Gathered:
    """Return the named runs; else the existing ones of the study and of its small version."""
    from hpcdl.report.runs.sources import Gathered, gather, holds_runs, walk

    folders = [folder, folder.with_name(f"{folder.name}-small")]
    chosen = paths or [path for path in folders if path.is_dir() and holds_runs(walk(path))]
    gathered = gather(chosen) if chosen else Gathered(runs=())
    for line in (*gathered.unreadable, *gathered.remarks):
        say(f"warning: {line}")
    return gathered


def _cost_cells(cost: PointCost) -> tuple[str, ...]:
    point = cost.point
    name = f"{point.strategy}/{point.servers}" if point.servers else point.strategy
    mark = " *" if cost.marks else ""
    return (
        str(cost.runs), name, str(point.nodes), str(point.workers), str(point.batch_size),
        format_seconds(cost.step_seconds.mean), _ends(cost.step_seconds), format_seconds(cost.seconds.mean),
        _ends(cost.seconds), f"{cost.node_hours.mean:.3g}", point.model + mark,
    )  # fmt: skip


def _ends(interval: Range) -> str:
    return format_seconds_interval(interval.mean, interval.low, interval.high)


def _print_total(cost: StudyCost) -> None:
    hours = cost.node_hours
    ends = f"[{hours.low:.3g}, {hours.high:.3g}]" if hours.bounded else NOT_BOUNDED
    put(f"{cost.num_runs} runs to go: {hours.mean:.3g} node-hours {ends}")
    put(f"one after the other: {format_seconds(cost.seconds.mean)} {_ends(cost.seconds)}")
    for line in cost.evidence:
        put(f"from {line}")
    marks = dict.fromkeys(mark for point in cost.points for mark in point.marks)
    for line in [*(f"* {mark}" for mark in marks), *(f"! {warning}" for warning in cost.warnings)]:
        put(line)


def _num_nodes(find_allocation: Any, plan: StudyRuns) -> int:
    """Return the number of nodes of the job, or at least as many as the largest run needs."""
    try:
        num_here = len(find_allocation(os.environ).nodes)
    except HpcdlError:
        num_here = 1
    return max(num_here, *(point.nodes for point in plan.points))


def _sentences(study: Study, plan: StudyRuns, estimate: StudyEstimate, cores: int, nodes: int) -> list[str]:
    where = f" on {nodes} nodes" if nodes > 1 else ""
    total = f"about {format_seconds(estimate.seconds)}{where}, {estimate.node_hours:.3g} node-hours"
    per_job = [f"{nodes} x {len(plan.only_nodes(nodes).runs)} runs" for nodes in plan.node_counts]
    num_measured, tries = len(plan.measured), len(plan.points) - len(plan.measured)
    tried = f", after {tries} tries to choose {', '.join(study.choice.axes)}" if study.choice else ""
    runs = f"{counted(num_measured, 'point')} x {counted(study.plan.repeats, 'repeat')}{tried}"
    lines = [f"{runs} = {counted(len(plan.runs), 'run')}: {total} to go"]
    if study.choice:
        total_s = sum(estimate.seconds_by_run.get(run.name, 0.0) for run in plan.runs if run.point.tried_for)
        lines.append(f"of that time the tries take about {format_seconds(total_s)}, one after the other")
    if len(per_job) > 1:
        lines.append(f"as jobs (--jobs), one for each number of nodes: {', '.join(per_job)}")
    if estimate.unknown:
        lines.append(f"{estimate.unknown} runs are in no estimate: their network is not in `hpcdl models`")
    guessed = len(estimate.seconds_by_run) - estimate.measured
    if guessed and study.plan.run_estimate is None:
        from hpcdl.models.table import FLOP_PER_CORE_AND_SECOND

        rate = f"{FLOP_PER_CORE_AND_SECOND / 1e9:.0f} GFLOP/s a core, {cores} cores a node as here, no communication"
        lines.append(f"guessed for {counted(guessed, 'run')}: {rate}; give --run-estimate TIME to say better")
    return lines


def _time(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)


def _plan_document(study: Study, plan: StudyRuns, state: StudyState, estimate: StudyEstimate) -> dict[str, Any]:
    return {
        "study": study.name,
        "mode": study.plan.mode,
        "runs": [
            {"name": run.name, "repeat": run.repeat, **dataclasses.asdict(run.point),
             "seconds": estimate.seconds_by_run.get(run.name), "status": state.run(run.name).status}
            for run in plan.runs
        ],
        "left_out": list(plan.left_out),
        "told": list(plan.remarks),
        "seconds": estimate.seconds,
        "node_hours": estimate.node_hours,
        "unknown": estimate.unknown,
    }  # fmt: skip
