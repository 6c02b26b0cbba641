"""Start a training run: first the checks, then the run directory, then the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hpcdl.checkpoint.memory import guarded as copies_guarded
from hpcdl.checkpoint.memory import place
from hpcdl.cluster import supervise as local
from hpcdl.cluster.environment import WITHOUT_MPI_VARIABLE, Placement, unused_components
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.launchers.base import LEFT_OUT_VARIABLE, Launcher, ranks_per_node
from hpcdl.cluster.limits import check_node
from hpcdl.cluster.status import FOLDER
from hpcdl.comm.agree import decided
from hpcdl.comm.observed import Observed
from hpcdl.comm.tcp import make_secret
from hpcdl.config.load import Config, ResolvedConfig, as_toml_values, flatten, replace
from hpcdl.config.schema import RanksConfig, StartConfig, TrainConfig
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import Interrupted, StoppedEarly, UsageError
from hpcdl.core.paths import check_backend, own_program
from hpcdl.core.processes.lifeline import identity
from hpcdl.core.processes.streams import StopRequest, caught
from hpcdl.core.protocols import Communicator, LaunchPlan
from hpcdl.core.records.run_record import RunRecord, read_record
from hpcdl.core.storage.lock import check_free
from hpcdl.launch.guard import guarded
from hpcdl.launch.relaunch import check_starts_ranks, until_done
from hpcdl.models.table import model_name
from hpcdl.node.engine import check_library, is_preloaded
from hpcdl.node.machines import read_topology
from hpcdl.node.plan import ALLOCATOR, environment_of, launch_plan
from hpcdl.node.profile import Settings, find_profile
from hpcdl.node.topology import Topology
from hpcdl.run import groups as chips
from hpcdl.run import rundir, shrink
from hpcdl.run.ended import end_noted
from hpcdl.run.journal import EventHandler, JournalReader
from hpcdl.run.listing import check_going_back
from hpcdl.run.plan import RunPlan, check_open_servers, keeps_bytes, prepare
from hpcdl.run.shrink import check_least, check_shrunk, with_least
from hpcdl.run.trained_data import description_of
from hpcdl.strategies.table import find_strategy
from hpcdl.trace.recorder import collected

NOTHING: Mapping[str, str] = {}


def train(resolved: ResolvedConfig[TrainConfig], on_event: EventHandler) -> tuple[Path, RunRecord]:
    """Run a training on the ranks of this node or of this job's nodes, and return its directory and record.

    `on_event` receives the journal's events while the ranks run.
    """
    with interruptible(resolved.config.checkpoint.resume or resolved.config.checkpoint.elastic):
        return _train(resolved, on_event)


def check(resolved: ResolvedConfig[TrainConfig]) -> RunPlan:
    """Run the checks before a run directory is made, except those of this node. Raises UsageError, ConfigError."""
    check_backend()
    check_least(resolved)
    return prepare(resolved)


def interruptible(resumes: bool) -> AbstractContextManager[None]:
    """Turn a signal that arrives before ranks exist into an error with its exit code."""

    def stop(number: int) -> None:
        if resumes:
            raise StoppedEarly("stopped by a signal before the ranks had started; continue with --resume")
        raise Interrupted("stopped by a signal before the ranks had started")

    return caught(stop, (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))


def _train(resolved: ResolvedConfig[TrainConfig], on_event: EventHandler) -> tuple[Path, RunRecord]:
    check_backend()
    check_least(resolved)
    launcher = find_launcher()
    run_plan = prepare(with_least(resolved, launcher))
    resolved = run_plan.resolved
    check_open_servers(run_plan.info, allowed=run_plan.config.safety.allow_grpc)
    check_shrunk(resolved, launcher)
    check_node(ranks_on_node(launcher, resolved.config.run), mpi=run_plan.info.features.mpi)
    run_dir = choose_run_dir(run_plan)
    if (record := _finished(run_dir, run_plan, on_event)) is not None:
        return run_dir, record
    plan, remarks = _plan(launcher, run_plan)

    def launch(now: ResolvedConfig[TrainConfig], environment: Mapping[str, str]) -> None:
        # The first launch: the plan made before the run directory still holds.
        if now is resolved and not environment:
            _run(launcher, run_plan, plan, run_dir, on_event)
            return
        shrunk = prepare(now)
        _run(launcher, shrunk, _plan(launcher, shrunk, environment)[0], run_dir, on_event)

    with rundir.begun(run_dir, _another(run_plan.config), run_plan.config.checkpoint, model=True) as place_of_run:
        run_dir = place_of_run.run_dir
        facts = rundir.facts_of(run_plan.config, run_plan.dataset.checksum, run_dir)
        rundir.create(run_dir, resolved, facts, description_of(run_plan.dataset))
        for text in remarks:
            on_event({"kind": "message", "text": text})
        # Left in reverse: the guard stays until the traces are collected, and the end is noted last.
        with (
            end_noted(run_dir, lambda: _unstarted(run_plan, plan)),
            place_of_run.restored_if_refused(),
            guarded(run_dir),
            collected(run_dir),
            _copies_kept(run_plan.config, run_dir),
        ):
            until_done(
                launch,
                launcher,
                run_dir,
                resolved,
                facts,
                lambda text: on_event({"kind": "message", "text": text}),
            )
    return run_dir, read_record(run_dir)


def _finished(run_dir: Path, run_plan: RunPlan, on_event: EventHandler) -> RunRecord | None:
    """Return the record if the run to resume has already finished, and report that; else None."""
    num_steps = run_plan.num_steps if run_plan.info.features.synchronous else None
    record = rundir.finished(run_dir, run_plan.config, num_steps)
    if record is not None:
        text = f"{run_dir} has finished, nothing is left to resume; --from-scratch trains it again from step 0"
        on_event({"kind": "message", "text": text})
    return record


def _plan(
    launcher: Launcher, run_plan: RunPlan, environment: Mapping[str, str] = NOTHING
) -> tuple[LaunchPlan, list[str]]:
    """Return `plan_for` this run; for --elastic also enable the way of continuing and describe it."""
    plan, remarks = plan_for(launcher, run_plan, environment)
    if not run_plan.config.checkpoint.elastic:
        return plan, remarks
    continues, way = shrink.way_of(run_plan, launcher)
    if continues:
        plan = dataclasses.replace(plan, continues=True, environment={**plan.environment, shrink.VARIABLE: "1"})
    return plan, [*remarks, way]


def _unstarted(run_plan: RunPlan, plan: LaunchPlan) -> RunRecord:
    """Return the record of a run that ended before its ranks wrote one."""
    return RunRecord(
        strategy=run_plan.info.name,
        model=run_plan.config.model.model,
        data=run_plan.dataset.name,
        data_checksum=run_plan.dataset.checksum,
        ranks=plan.num_ranks,
        workers=run_plan.num_workers,
        servers=run_plan.num_servers,
        nodes=-(-plan.num_ranks // plan.ranks_per_node),
        ranks_per_node=plan.ranks_per_node,
        batch_per_rank=run_plan.config.data.batch_size,
        global_batch=run_plan.global_batch,
        config=as_toml_values(run_plan.config),
    )


def _copies_kept(config: TrainConfig, run_dir: Path) -> AbstractContextManager[None]:
    """Let ranks keep copies of their state on this node for their successors, while the context is open."""
    if not config.checkpoint.local_checkpoint_every:
        return nullcontext()
    return copies_guarded(place(config.checkpoint.local_checkpoint_folder, run_dir, identity(os.getpid())), run_dir)


def _run(launcher: Launcher, run_plan: RunPlan, plan: LaunchPlan, run_dir: Path, on_event: EventHandler) -> None:
    reader = JournalReader(run_dir)

    def tick() -> None:
        with contextlib.suppress(OSError):  # the terminal or the reader of a pipe is gone: no reason to end a run
            for event in reader.read():
                on_event(event)

    def warn(text: str) -> None:
        on_event({"kind": "message", "text": f"warning: {text}"})

    mpi, folder = run_plan.info.features.mpi, run_dir / FOLDER
    plan = able_to_meet(plan, folder, mpi=mpi)
    with python_of_ranks(launcher, run_plan.config.run, plan) as python:
        command = own_program("hpcdl.rank.main", str(run_dir), python=python)
        local.start(launcher, plan, command, folder=folder, mpi=mpi, tick=tick, warn=warn)


def able_to_meet(plan: LaunchPlan, folder: Path, *, mpi: bool) -> LaunchPlan:
    """Return `plan` for ranks that find each other through `folder` and a secret, if they run without MPI."""
    if mpi or plan.num_ranks == 1:
        return plan
    make_secret(folder)
    return dataclasses.replace(plan, environment={**plan.environment, WITHOUT_MPI_VARIABLE: "1"})


def python_of_ranks(launcher: Launcher, run: StartConfig, plan: LaunchPlan) -> AbstractContextManager[str]:
    """Return the Python that starts the ranks: this one, or with --stage-env its copy on each node's own storage."""
    if not run.stage_env:
        return nullcontext(sys.executable)
    from hpcdl.cluster import own_env

    num_nodes = -(-plan.num_ranks // plan.ranks_per_node)
    left_out = {name: value for name, value in plan.environment.items() if name == LEFT_OUT_VARIABLE}
    return own_env.staged(launcher, num_nodes, {**os.environ, **left_out})


def choose_run_dir(run_plan: RunPlan) -> Path:
    """Return the folder of this run. Raises UsageError if it holds another run that cannot be resumed as asked."""
    config = run_plan.config
    named = config.run.run_dir
    run_dir = free_run_dir(named) if named else _default(config)
    check_run_dir(run_plan, run_dir)
    return run_dir


def _default(config: TrainConfig) -> Path:
    return rundir.default_run_dir(config.model.model, config.exchange.strategy)


def _another(config: TrainConfig) -> Callable[[], Path] | None:
    """Return what chooses another run directory than one just taken; None if the user named it."""
    return None if config.run.run_dir else functools.partial(_default, config)


def check_run_dir(run_plan: RunPlan, run_dir: Path) -> None:
    """Raise UsageError or ConfigError if this run can neither begin in `run_dir` nor resume there."""
    config = run_plan.config
    rundir.check_place(run_dir, config.checkpoint)
    check_going_back(run_dir, config.checkpoint)
    if config.checkpoint.resume:
        kept = keeps_bytes(run_plan.dataset)
        rundir.check_resumed(run_dir, config, run_plan.dataset.checksum, keeps_bytes=kept)


def ranks_on_node(launcher: Launcher, run: RanksConfig, environment: Mapping[str, str] = NOTHING) -> int:
    """Return the number of ranks that each node of the job will have.

    `environment`: variables that tell the launcher which nodes to exclude.
    """
    return ranks_per_node(launcher.hosts({**os.environ, **environment}), run.ranks)


def free_run_dir(run_dir: Path) -> Path:
    """Return `run_dir`. Raises UsageError if another process is writing to it."""
    if run_dir.is_dir():
        check_free(run_dir)
    return run_dir


def plan_for(
    launcher: Launcher, run_plan: RunPlan, environment: Mapping[str, str] = NOTHING
) -> tuple[LaunchPlan, list[str]]:
    """Return the plan for starting this run's ranks, and messages about the chosen node profile."""
    config, topology = run_plan.config, read_topology()
    groups = config.elastic.groups
    share = ranks_on_node(launcher, config.run, environment)
    if groups > 1:
        weights_bytes = chips.weights_bytes(config.model.model)
        chips.check_memory(share, weights_bytes, chips.data_bytes(run_plan.dataset), topology)
    unprofiled = chips.near_memory(groups, share, topology)
    return plan_under_profile(config.run, model_name(config.model.model), topology, share, unprofiled, environment)


def chosen_settings(run: RanksConfig) -> dict[str, Any]:
    """Return the engine settings that `run` itself fixes, by name (node/profile.py)."""
    settings: dict[str, Any] = {}
    if run.onednn != AUTO:
        settings["onednn"] = run.onednn == "on"
    if run.allocator != AUTO:
        check_library(run.allocator)
        settings["allocator"] = run.allocator
    if run.inter_op_threads != AUTO:
        settings["inter_op_threads"] = run.inter_op_threads
    return settings


def check_started_with(run: RanksConfig, launcher: str) -> None:
    """Raise UsageError if a launcher started this rank without the environment that `run` needs: too late to set it."""
    wanted = environment_of(Settings(**chosen_settings(run)), openmp=False)
    # The allocator comes first, before what LD_PRELOAD already holds.
    preloads = wanted.pop("LD_PRELOAD", "").split(":")[0]
    if wanted.pop(ALLOCATOR, "") and is_preloaded(run.allocator):
        preloads = ""
    missing = [f"{name}={value}" for name, value in wanted.items() if os.environ.get(name) != value]
    missing += [f"LD_PRELOAD={preloads}"] if preloads else []
    if missing:
        raise UsageError(
            f"--onednn, --allocator and --inter-op-threads are for ranks that hpcdl starts; this one was started by "
            f"{launcher}: leave them out, or export {' '.join(missing)} before it"
        )


def plan_under_profile(
    run: RanksConfig,
    model: str,
    topology: Topology,
    share: int,
    unprofiled: Settings | None = None,
    environment: Mapping[str, str] = NOTHING,
) -> tuple[LaunchPlan, list[str]]:
    """Return the plan of `run` with the profile that fits `model` best, else `unprofiled`, and messages.

    `share` is the number of ranks on each node.
    """
    profile = find_profile(run.profile, model, topology)
    settings = profile.settings if profile else unprofiled
    plan = launch_plan(topology, settings, run.ranks, share, chosen=chosen_settings(run))
    named = {"HPCDL_PROFILE": str(profile.path)} if profile else {}
    plan = dataclasses.replace(plan, environment={**plan.environment, **named, **environment})
    warning = [f"warning: {unused}"] if (unused := unused_components()) else []
    return plan, [*warning, *([profile.sentence] if profile else [])]


def train_inside(resolved: ResolvedConfig[TrainConfig], process: Placement, on_event: EventHandler) -> Path:
    """Train as one rank of the launcher that started this process. Collective: every rank must call it.

    On rank 0 `on_event` receives the journal's events.
    """
    from hpcdl.rank.job import run_rank
    from hpcdl.rank.start import Joined, as_rank
    from hpcdl.supervision.watchdog import FOLDER as WATCH_FOLDER
    from hpcdl.supervision.watchdog import leave_without_lost

    check_backend()
    resolved = with_ranks(resolved, process)
    check_least(resolved)
    check_starts_ranks(resolved.config.checkpoint.elastic, process.launcher)
    check_started_with(resolved.config.run, process.launcher)
    StopRequest().install()
    mpi = find_strategy(resolved.config.exchange.strategy).features.mpi
    held, earlier, run_plans, start_words = (
        contextlib.ExitStack(),
        list[rundir.EarlierState](),
        list[RunPlan](),
        list[str](),
    )

    def agree(communicator: Observed) -> Joined:
        run_dir, word = _agreed_run_dir(resolved, communicator, on_event, held, earlier, run_plans)
        start_words.append(word)
        return Joined(watch_folder=run_dir / FOLDER / WATCH_FOLDER / word, run_dir=run_dir)

    with held, as_rank(process, agree, mpi=mpi) as (communicator, watchdog, joined):
        run_dir = joined.run_dir
        assert run_dir is not None
        # Restore before rank 0 ends the other ranks: their launcher may end rank 0 with them.
        with earlier[0].restored_if_refused() if earlier else nullcontext():
            # Each rank checks its own copy: a file that is intact for rank 0 may be damaged on another node.
            if start_words[0]:
                run_plan = run_plans[0] if run_plans else prepare(resolved)
                run_rank(run_plan, communicator, run_dir, on_event, watchdog)
    leave_without_lost(communicator)
    return run_dir


def with_ranks(resolved: ResolvedConfig[Config], process: Placement) -> ResolvedConfig[Config]:
    """Return the config with the launcher's number of ranks. Raises UsageError if --ranks differs from it."""
    asked = flatten(resolved.config)["ranks"]
    if resolved.origins["ranks"] != "default" and asked != process.size:
        raise UsageError(
            f"--ranks {asked}, but {process.launcher} started {process.size}; leave --ranks out under a launcher"
        )
    origins = {**resolved.origins, "ranks": f"launcher ({process.launcher})"}
    return ResolvedConfig(config=replace(resolved.config, ranks=process.size), origins=origins)


def _agreed_run_dir(
    resolved: ResolvedConfig[TrainConfig],
    communicator: Communicator,
    on_event: EventHandler,
    held: contextlib.ExitStack,
    earlier: list[rundir.EarlierState],
    run_plans: list[RunPlan],
) -> tuple[Path, str]:
    """Check, make and lock the run directory on rank 0; return it to all ranks, with a random word for this start.

    The word is empty if the run has already finished and there is nothing to resume.
    On rank 0, `run_plans` gets the plan, and `earlier` gets the directory's earlier state.
    """

    def decide() -> tuple[str, str]:
        run_plan = prepare(resolved)
        check_open_servers(run_plan.info, allowed=run_plan.config.safety.allow_grpc)
        run_dir = choose_run_dir(run_plan)
        run_plans.append(run_plan)
        if _finished(run_dir, run_plan, on_event) is not None:
            return str(run_dir), ""
        begun = rundir.begun(run_dir, _another(run_plan.config), run_plan.config.checkpoint, model=True)
        earlier.append(held.enter_context(begun))
        run_dir = earlier[-1].run_dir
        facts = rundir.facts_of(run_plan.config, run_plan.dataset.checksum, run_dir)
        rundir.create(run_dir, run_plan.resolved, facts, description_of(run_plan.dataset))
        return str(run_dir), uuid.uuid4().hex

    run_dir, word = decided(communicator, decide)
    return Path(run_dir), word
