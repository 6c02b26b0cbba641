"""`hpcdl node | tune-threads`: describe this node, and find its fastest threads, binding and memory by measuring."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.groups import GroupedCommand, completer
from hpcdl.cli.options import ConfigFlag, JsonFlag, QuietFlag, SetFlag, resolved, takes_settings
from hpcdl.cli.output import Commentary, print_json, print_table, put, say
from hpcdl.config.schema import TuneConfig
from hpcdl.core.paths import typed
from hpcdl.core.units import counted, format_bytes, format_list, format_rate, format_seconds

if TYPE_CHECKING:
    from hpcdl.node.profile import Profile
    from hpcdl.tuning.tune import PreparedSearch, Tuned


commands = typer.Typer(no_args_is_help=True, help="Look at this node, or at a known machine.")
_TUNING = "hpcdl tune-threads --model lenet --batch-size 16 --budget 10m, or with the model that you train"
MachineFlag = Annotated[
    str | None,
    typer.Option(
        "--machine", metavar="NAME", help="A known machine, or an hwloc XML file.", autocompletion=completer("machine")
    ),
]
ProfileFlag = Annotated[
    str,
    typer.Option(
        "--profile", metavar="FILE", help="A profile, `auto` or `none`. [auto]", autocompletion=completer("profile")
    ),
]
ModelFlag = Annotated[
    str,
    typer.Option(
        "--model", metavar="TEXT", help="Network whose profile is looked for.", autocompletion=completer("model")
    ),
]
RanksFlag = Annotated[
    int | None,
    typer.Option("--ranks-per-node", min=1, metavar="N", help="Ranks that share the node. [the profile's, or 1]"),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.add_typer(commands, name="node")
    epilog = "Example: hpcdl tune-threads --model resnet50 --batch-size 32 --budget 10m"
    app.command("tune-threads", cls=GroupedCommand, epilog=epilog)(tune_threads)


@commands.command(epilog="Example: hpcdl node show --machine stampede2-knl-quadrant-flat")
def show(
    machine: MachineFlag = None,
    profile: ProfileFlag = "auto",
    model: ModelFlag = "",
    ranks_per_node: RanksFlag = None,
    json: JsonFlag = False,
) -> None:
    """Show packages, NUMA nodes, caches and cores. Also what this process may use, and where ranks would be placed."""
    from hpcdl.node.accelerators import described
    from hpcdl.node.engine import find_engine
    from hpcdl.node.plan import plan_node
    from hpcdl.node.topology import draw

    planned = plan_node(machine, profile, model, ranks_per_node)
    topology, plan = planned.topology, planned.plan
    if json:
        document = dataclasses.asdict(topology) | {
            "memory_mode": topology.memory_mode, "cluster_mode": topology.cluster_mode,
            "fingerprint": topology.fingerprint, "cpus_by_local_rank": [list(cpus) for cpus in plan.cpus_by_local_rank],
        }  # fmt: skip
        print_json(document)
        return
    put(topology.summary)
    put(f"memory mode    {topology.memory_mode}, {topology.cluster_mode}")
    for cache in topology.caches:
        cores = counted(cache.cores_each, "core")
        put(f"cache {cache.level:<8} {cache.num} x {format_bytes(cache.size_bytes)}, {cores} each")
    memory = format_list(topology.allowed_memory_nodes)
    put(f"may use        CPUs {format_list(topology.allowed_cpus)}, NUMA nodes {memory}")
    put(f"fingerprint    {topology.fingerprint} (from {topology.source})")
    if topology.devices:
        near = "; ".join(f"{device}: {format_list(cpus)}" for device, cpus in enumerate(topology.near_devices))
        put(f"GPUs           {described(topology.devices)}" + (f", CPUs near them {near}" if near else ""))
    if machine is None:
        put(f"engine         {find_engine().summary}")
    put()
    put("\n".join(draw(topology, plan.cpus_by_local_rank)))
    if planned.sentence:
        say(planned.sentence)
    say(f"next: {typed('tune-threads', '--plan', '--machine', machine) if machine else _TUNING}")


@commands.command(epilog='Example: eval "$(hpcdl node env --model resnet50)"')
def env(
    machine: MachineFlag = None,
    profile: ProfileFlag = "auto",
    model: ModelFlag = "",
    ranks_per_node: RanksFlag = None,
    json: JsonFlag = False,
) -> None:
    """Print the profile's environment as shell exports. For use without hpcdl; lines of numactl are comments."""
    from hpcdl.node.plan import numactl_words, plan_node, shell_exports

    planned = plan_node(machine, profile, model, ranks_per_node)
    if json:
        every = [numactl_words(planned.plan, rank) for rank in range(planned.plan.ranks_per_node)]
        print_json({"environment": dict(planned.plan.environment), "numactl": every})
    else:
        put("\n".join(shell_exports(planned.plan.environment)))
        for rank in range(planned.plan.ranks_per_node):
            numactl = numactl_words(planned.plan, rank)
            if numactl:
                put(f"# local rank {rank}: {' '.join(numactl)} COMMAND")
    say(planned.sentence or "no profile fits this node: these are hpcdl's defaults; make one with `hpcdl tune-threads`")


ResumeFlag = Annotated[bool, typer.Option("--resume", help="Continue from the trial log.")]
PlanFlag = Annotated[bool, typer.Option("--plan", help="Print every candidate with its command lines; run nothing.")]
ReplayFlag = Annotated[
    Path | None, typer.Option("--replay", metavar="FILE", help="Search a CSV table of recorded trials; run nothing.")
]
NUM_LISTED = 12
RANK_COMMAND = ("python", "-m", "hpcdl.bench.step", "FOLDER")
"""The command of a trial on each rank; each trial has its own folder."""


@takes_settings(TuneConfig)
def tune_threads(
    flags: dict[str, Any],
    replay: ReplayFlag = None,
    plan: PlanFlag = False,
    resume: ResumeFlag = False,
    config: ConfigFlag = None,
    set_: SetFlag = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> None:
    """Find this node's fastest settings by measuring.

    Threads, binding, memory policy, engine and allocator; `hpcdl train` then uses what was found.
    """
    # The search's matrices are small: on a node with many cores BLAS threads would only slow it down.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings = resolved(TuneConfig, "tune-threads", flags, config, set_).config
    if replay is not None:
        _replay(replay, settings.search.seed, json)
        return
    from hpcdl.tuning.tune import prepare, replaced, tune

    run_plan = prepare(settings, planning=plan)
    commentary = Commentary(quiet=quiet)
    if run_plan.remark:
        commentary.say(run_plan.remark)
    if plan:
        _show_plan(run_plan, json)
        return
    if not resume and (warning := replaced(run_plan)):
        commentary.say(warning)
    commentary.say(f"{run_plan.topology.summary}; {run_plan.engine.summary}")
    most = settings.search.max_samples
    limit = format_seconds(settings.search.budget) + (f" or {most} samples" if most else "")
    commentary.say(f"{len(run_plan.space.candidates)} candidates, {limit} to search")
    with commentary.progress("tuning", settings.search.budget) as bar:
        tuned = tune(run_plan, resume=resume, notify=lambda state: bar.update(state.seconds, _note(state)))
    _show_result(tuned, settings, json, commentary)
    if run_plan.engine.bfloat16:
        how = typed("bench", "step", "--model", tuned.profile.model, "--batch-size", str(tuned.profile.batch_size))
        commentary.say(
            f"this processor multiplies bfloat16 ({run_plan.engine.bfloat16}), which is never chosen for you: "
            f"try {how} --precision mixed_bfloat16, and compare accuracies"
        )


def _replay(path: Path, seed: int, json: bool) -> None:
    from hpcdl.tuning.replay import read_table, replay

    result = replay(read_table(path), seed=seed)
    if json:
        print_json({key: value for key, value in dataclasses.asdict(result).items() if key != "choice"})
        return
    put("winner   " + " ".join(f"{name}={value}" for name, value in result.winner.items()))
    put(f"trials   {result.trials_used} candidates measured")
    put(f"samples  {result.samples_used} used, {result.samples_exhaustive} by exhaustive search with three repeats")
    put(f"regret   {100 * result.regret:.2f} % below the best mean in the table")


def _show_plan(run_plan: PreparedSearch, json: bool) -> None:
    from hpcdl.node.accelerators import choose
    from hpcdl.node.plan import command_line
    from hpcdl.node.profile import chosen, describe
    from hpcdl.tuning.trials import Workload, bench_step_command

    requested = run_plan.config.workload
    workload = Workload(
        model=requested.model or "MODEL", batch_size=requested.batch_size, data=requested.data, steps=requested.steps
    )
    rows = []
    for candidate in run_plan.space.candidates:
        trial_words = bench_step_command(workload, candidate.settings, Path("PROFILE.toml"))
        trial = shlex.join(["hpcdl", *trial_words[trial_words.index("bench") :]])
        # The processes of the trial: each local rank with its own environment, cores, memory and GPU.
        ranks = range(candidate.plan.ranks_per_node)
        claims = [choose(os.environ, rank, candidate.plan.cpus_by_local_rank) for rank in ranks]
        shown = [f"{claim.variable}={claim.device} " if claim and run_plan.topology.devices else "" for claim in claims]
        lines = [shown[rank] + command_line(candidate.plan, rank, RANK_COMMAND) for rank in ranks]
        rows.append((candidate, trial, lines))
    if json:
        print_json({
            "machine": run_plan.topology.summary,
            "engine": run_plan.engine.summary,
            "devices": dict(run_plan.topology.devices),
            "candidates": [
                {"settings": chosen(each.settings), "origin": each.origin, "environment": dict(each.plan.environment),
                 "cpus_by_local_rank": [list(cpus) for cpus in each.plan.cpus_by_local_rank],
                 "memory_policy": each.plan.memory_policy,
                 "memory_nodes_by_local_rank": [list(nodes) for nodes in each.plan.memory_nodes_by_local_rank],
                 "command": trial, "commands": lines}
                for each, trial, lines in rows
            ],
            "left_out": dict(run_plan.space.dropped),
        })  # fmt: skip
        return
    put(f"{run_plan.topology.summary}\n{run_plan.engine.summary}\n{len(rows)} candidates")
    for number, (candidate, trial, lines) in enumerate(rows, start=1):
        put(f"\n{number}. {describe(candidate.settings)}" + (f"  ({candidate.origin})" if candidate.origin else ""))
        put(f"   trial: {trial}")
        for rank, line in enumerate(lines):
            put(f"   local rank {rank}: {line}")
    for reason, count in run_plan.space.dropped.items():
        say(f"left out {count}: {reason}")
    say(f"next: {_TUNING}")


def _note(state: Any) -> str:
    if state.best is None:
        return f"{state.num_samples} samples"
    from hpcdl.node.profile import describe

    return f"best {format_rate(state.best.images_per_second, state.counted)}: {describe(state.settings)}"


def _show_result(tuned: Tuned, settings: TuneConfig, json: bool, commentary: Commentary) -> None:
    from hpcdl.node.profile import as_document

    if json:
        document = as_document(tuned.profile) | {"path": str(tuned.path), "log": str(tuned.log)}
        print_json(document | {"num_samples": tuned.result.num_samples, "seconds": tuned.result.seconds})
    else:
        _print_tables(tuned)
    for warning in tuned.result.warnings:
        say(f"warning: {warning}")
    say(f"profile: {tuned.path}")
    if not tuned.result.settled:
        more = " and more --max-samples" if settings.search.max_samples else ""
        say(f"another may be faster: continue the search by the same command with --resume{more}")
    commentary.say(f"next: {_with_profile(tuned.profile, settings)}   (it uses the profile)")


def _with_profile(profile: Profile, settings: TuneConfig) -> str:
    """Return the command that trains with the profile; for a network whose samples are unknown, that times its step."""
    from hpcdl.run.trained_data import made_up_data

    model, data = settings.workload.model or profile.model, settings.workload.data
    options: list[object] = ["--strategy", "ring", "--ranks", profile.settings.ranks_per_node or 1]
    options += ["--batch-size", profile.batch_size]
    stored: list[object] = [] if settings.output.out is None else ["--profile", settings.output.out]
    if data is not None:
        return typed("train", "--model", model, "--data", data, *options, *stored)
    if (made_up := made_up_data(model)) is not None:
        return typed("train", "--model", model, "--data", made_up, "--steps", 20, *options, *stored)
    return typed("bench", "step", "--model", model, *options, *(stored or ["--profile", "auto"]))


def _print_tables(tuned: Tuned) -> None:
    from hpcdl.node.profile import describe, show
    from hpcdl.tuning.findings import main_effects

    print_table(
        [f"{tuned.profile.counted}/s", "+-", "n", "memory/rank", "settings"],
        [
            [f"{trial.images_per_second:.4g}" if trial.images_per_second else trial.status,
             f"{trial.ci95:.2g}" if trial.ci95 else "", str(trial.n),
             format_bytes(trial.memory_bytes_per_rank) if trial.memory_bytes_per_rank else "",
             " ".join(f"{name}={show(value)}" for name, value in trial.settings.items())]
            for trial in tuned.result.trials[:NUM_LISTED]
        ],
    )  # fmt: skip
    effects = main_effects(tuned.result.trials)
    if effects:
        put()
        rows = [
            [e.setting, e.value, f"{100 * (e.ratio - 1):+.1f} %",
             f"[{100 * (e.low - 1):+.1f}, {100 * (e.high - 1):+.1f} %]", str(e.num_trials)]
            for e in effects[:NUM_LISTED]
        ]  # fmt: skip
        print_table(["setting", "value", "effect", "95 %", "trials"], rows)
    winner = "winner" if tuned.result.settled else "best so far"
    put(f"\n{winner}: {describe(tuned.profile.settings)}; {tuned.profile.verdict}")
