"""`hpcdl tune-threads`: find a node's fastest threads, binding and memory by measuring."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.groups import GroupedCommand
from hpcdl.cli.options import ConfigFlag, JsonFlag, QuietFlag, SetFlag, resolved, takes_settings
from hpcdl.cli.output import Commentary, print_json, print_table, put, say
from hpcdl.config.schema import TuneConfig
from hpcdl.core.paths import typed
from hpcdl.core.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from hpcdl.tuning.tune import PreparedSearch, Tuned

ResumeFlag = Annotated[bool, typer.Option("--resume", help="Go on from the trial log.")]
PlanFlag = Annotated[bool, typer.Option("--plan", help="Print every candidate with its command lines; run nothing.")]
ReplayFlag = Annotated[
    Path | None, typer.Option("--replay", metavar="FILE", help="Search a CSV table of recorded trials; run nothing.")
]
NUM_TOLD = 12
RANK_COMMAND = ("python", "-m", "hpcdl.bench.step", "FOLDER")
"""What a trial runs on each rank; the folder is the trial's own."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    epilog = "Example: hpcdl tune-threads --model resnet50 --batch-size 32 --budget 10m"
    app.command("tune-threads", cls=GroupedCommand, epilog=epilog)(tune_threads)


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
    # The search's matrices are small: on a node of many cores BLAS threads would only get in its way.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings = resolved(TuneConfig, "tune-threads", flags, config, set_).config
    if replay is not None:
        _replay(replay, settings.search.seed, json)
        return
    from hpcdl.tuning.tune import prepare, tune

    run_plan = prepare(settings, planning=plan)
    commentary = Commentary(quiet=quiet)
    if run_plan.remark:
        commentary.say(run_plan.remark)
    if plan:
        _show_plan(run_plan, json)
        return
    commentary.say(f"{run_plan.topology.summary}; {run_plan.engine.summary}")
    most = settings.search.max_samples
    limit = format_seconds(settings.search.budget) + (f" or {most} samples" if most else "")
    commentary.say(f"{len(run_plan.space.candidates)} candidates, {limit} to search")
    with commentary.progress("tuning", settings.search.budget) as bar:
        tuned = tune(run_plan, resume=resume, notify=lambda state: bar.update(state.seconds, _note(state)))
    _show_result(tuned, json, commentary)
    if tuned.path is not None and run_plan.engine.bfloat16:
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
    from hpcdl.node.settings import chosen, describe
    from hpcdl.tuning.trials import Workload, bench_step_command

    own = run_plan.config.workload
    workload = Workload(model=own.model or "MODEL", batch_size=own.batch_size, data=own.data, steps=own.steps)
    rows = []
    for candidate in run_plan.space.candidates:
        words = bench_step_command(workload, candidate.settings, Path("PROFILE.toml"))
        trial = shlex.join(["hpcdl", *words[words.index("bench") :]])
        # What the trial then starts: each local rank with its own environment, cores, memory and GPU.
        ranks = range(candidate.plan.ranks_per_node)
        claims = [choose(os.environ, rank, candidate.plan.cpus_by_local_rank) for rank in ranks]
        shown = [f"{one.variable}={one.device} " if one and run_plan.topology.devices else "" for one in claims]
        lines = [shown[rank] + command_line(candidate.plan, rank, RANK_COMMAND) for rank in ranks]
        rows.append((candidate, trial, lines))
    if json:
        print_json({
            "machine": run_plan.topology.summary,
            "engine": run_plan.engine.summary,
            "devices": dict(run_plan.topology.devices),
            "candidates": [
                {"settings": chosen(item.settings), "origin": item.origin, "environment": dict(item.plan.environment),
                 "cpus_by_local_rank": [list(cpus) for cpus in item.plan.cpus_by_local_rank],
                 "memory_policy": item.plan.memory_policy,
                 "memory_nodes_by_local_rank": [list(nodes) for nodes in item.plan.memory_nodes_by_local_rank],
                 "command": trial, "commands": lines}
                for item, trial, lines in rows
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
    say("next: hpcdl tune-threads --model M --batch-size B --budget 10m")


def _note(state: Any) -> str:
    if state.best is None:
        return f"{state.num_samples} samples"
    from hpcdl.node.settings import describe

    return f"best {format_rate(state.best.images_per_second, state.counted)}: {describe(state.settings)}"


def _show_result(tuned: Tuned, json: bool, commentary: Commentary) -> None:
    from hpcdl.node.profile import as_document
    from hpcdl.node.settings import describe

    if json:
        document = as_document(tuned.profile) | {"path": str(tuned.path) if tuned.path else None, "log": str(tuned.log)}
        print_json(document | {"num_samples": tuned.found.num_samples, "seconds": tuned.found.seconds})
    elif tuned.path is not None:
        _print_tables(tuned)
    else:
        put(f"defaults: {describe(tuned.profile.settings)}")
    for warning in tuned.found.warnings:
        say(f"warning: {warning}")
    if tuned.path is None:
        say("no trial ended within the budget: the defaults stay in force, nothing was stored; give a longer --budget")
        return
    say(f"profile: {tuned.path}")
    command = typed("train", "--model", tuned.profile.model, "--data", "DIR", "--strategy", "ring", "--ranks", "N")
    commentary.say(f"next: {command}   (it uses the profile)")


def _print_tables(tuned: Tuned) -> None:
    from hpcdl.node.settings import describe, show
    from hpcdl.tuning.recorded import main_effects

    print_table(
        [f"{tuned.profile.counted}/s", "+-", "n", "memory/rank", "settings"],
        [
            [f"{trial.images_per_second:.4g}" if trial.images_per_second else trial.status,
             f"{trial.ci95:.2g}" if trial.ci95 else "", str(trial.n),
             format_bytes(trial.memory_bytes_per_rank) if trial.memory_bytes_per_rank else "",
             " ".join(f"{name}={show(value)}" for name, value in trial.settings.items())]
            for trial in tuned.found.trials[:NUM_TOLD]
        ],
    )  # fmt: skip
    effects = main_effects(tuned.found.trials)
    if effects:
        put()
        rows = [[e.setting, e.value, f"{100 * (e.ratio - 1):+.1f} %", str(e.num_trials)] for e in effects[:NUM_TOLD]]
        print_table(["setting", "value", "effect", "trials"], rows)
    put(f"\nwinner: {describe(tuned.profile.settings)}; {tuned.profile.verdict}")
