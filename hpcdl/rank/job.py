"""What every rank of a run does, whatever its role. Does not import TensorFlow: servers do not need it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcdl.comm.observed import EXCHANGE, Observed, observe
from hpcdl.config.load import flatten
from hpcdl.core.errors import RankError, UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.data.format.order import pass_slice
from hpcdl.data.read.staging import resident, staged
from hpcdl.data.read.windows import shared_out
from hpcdl.faults.inject import Injection
from hpcdl.rank import results
from hpcdl.rank.serve import serve
from hpcdl.run.journal import EventHandler
from hpcdl.run.plan import RunPlan
from hpcdl.run.shrink import ShrunkRun, workers_and_servers
from hpcdl.strategies.base.strategy import Context
from hpcdl.supervision import control, runtime
from hpcdl.supervision.pace import WINDOWS, Eviction, PaceKeeper
from hpcdl.supervision.watchdog import Actions, Limits, Watchdog
from hpcdl.trace.recorder import recording


def run_rank(
    run_plan: RunPlan,
    communicator: Communicator,
    run_dir: Path,
    on_event: EventHandler | None = None,
    watch: Watchdog | None = None,
    shrunk: ShrunkRun | None = None,
) -> None:
    """Train or serve, depending on the rank. Collective over all ranks; on rank 0 `on_event` gets the journal's events.

    `watch`, if given, watches this rank and gets the run's own limits. With `shrunk` the survivors continue in place
    when ranks are lost.
    """
    if communicator.size != run_plan.config.run.ranks:
        raise UsageError(f"--ranks {run_plan.config.run.ranks}, but {communicator.size} were started")
    communicator = observe(communicator)
    communicator.monitor.role = "worker" if communicator.rank < run_plan.num_workers else "server"
    software = runtime.software_versions(communicator.library)
    _check_same_start(run_plan, communicator, software)
    injection = Injection(run_plan.config.safety.inject, communicator.monitor, run_dir)
    communicator = injection.impaired(communicator)
    with recording(injection.trace_beside(run_plan.config.run.trace), communicator, run_dir):
        _run_rank(run_plan, communicator, run_dir, on_event, watch, software, injection, shrunk)


def _run_rank(
    run_plan: RunPlan,
    communicator: Observed,
    run_dir: Path,
    on_event: EventHandler | None,
    watch: Watchdog | None,
    software: dict[str, str],
    injection: Injection,
    shrunk: ShrunkRun | None,
) -> None:
    hosts = communicator.allgather_json(communicator.host)
    run_plan = _shared_out(run_plan, hosts)
    watch = watch or Watchdog(monitor=communicator.monitor, folder=run_dir, actions=Actions(end=_never))
    watch.limits = Limits(stall_s=run_plan.config.safety.stall_timeout, busy_s=run_plan.config.safety.busy_timeout)
    watch.hosts = dict(enumerate(hosts))
    if not run_plan.info.features.synchronous:  # worker 0 evaluates and saves the center
        monitor = communicator.monitor
        watch.actions.is_optional = lambda rank: rank != monitor.first_left and rank < run_plan.num_workers
    watch.besides = _pace_keeper(run_plan, hosts, watch).look
    started = results.first_record(run_plan, hosts, software, os.environ.get("HPCDL_PROFILE", ""))
    unbound = communicator.allgather_json(runtime.binding_warning())
    warnings = [f"rank {rank}: {warning}" for rank, warning in enumerate(unbound) if warning]
    warnings += injection.log_lines()
    started = dataclasses.replace(started, warnings=[*started.warnings, *warnings])
    context = dataclasses.replace(context_of(run_plan, communicator), in_place=shrunk is not None)
    if communicator.rank < run_plan.num_workers:
        communicator.monitor.doing("importing TensorFlow")
        # With varying shapes oneDNN would keep the set-up of each one (docs/decisions/0233).
        runtime.import_tensorflow(fixed_shapes=not any(field.variable for field in run_plan.dataset.fields))
        from hpcdl.rank.worker import run_worker

        with injection, _staged(run_plan, communicator) as near:
            if run_plan.config.elastic.groups > 1:  # read from the node's local storage if it has a copy
                near = dataclasses.replace(near, dataset=resident(near.dataset, communicator.rank))
            near = dataclasses.replace(near, dataset=injection.readable(near.dataset))
            communicator = run_worker(near, communicator, context, run_dir, started, on_event, watch, injection, shrunk)
    else:
        with injection:
            least = None if shrunk is None else shrunk.least
            communicator = serve(run_plan, context, communicator, watch, least)
    communicator.monitor.recorder.quiesced(communicator, last=True)
    communicator.barrier()


def _pace_keeper(run_plan: RunPlan, hosts: Sequence[str], watch: Watchdog) -> PaceKeeper:
    """Return what finds persistently slow workers. TensorFlow's own servers do not show which worker is slow."""
    config, num_workers = run_plan.config, run_plan.num_workers if run_plan.info.features.mpi else 0
    evict_slow, least = config.checkpoint.evict_slow, config.checkpoint.min_workers or num_workers
    # An asynchronous worker can leave in place. Without worker 0, which evaluates and saves the center, the run needs
    # new ranks.
    in_place = [rank > 0 and not run_plan.info.features.synchronous for rank in range(num_workers)]

    def enough(rank: int, others: Sequence[int]) -> bool:
        if in_place[rank]:
            return len(others) >= least
        left_out = hosts.count(hosts[rank]) if len(set(hosts)) > 1 else 1
        return workers_and_servers(config, len(hosts) - left_out)[0] >= least

    def leave(rank: int, text: str) -> None:
        watch.evict(rank, text, in_place=in_place[rank])

    return PaceKeeper(
        monitor=watch.monitor,
        folder=watch.folder,
        window_s=config.safety.stall_timeout / WINDOWS,
        shares=[run_plan.weight_of(rank) for rank in range(num_workers)],
        log=lambda text: watch.actions.log(text),  # looked up at each call: run_worker replaces it
        eviction=None if evict_slow is None else Eviction(factor=evict_slow, enough=enough, leave=leave),
    )


def _never(error: RankError) -> None:
    """Fail: used for a watchdog that is never started."""
    raise error


@contextlib.contextmanager
def _staged(run_plan: RunPlan, communicator: Communicator) -> Iterator[RunPlan]:
    """Inside, the run reads its data from a copy on each node's local storage if --stage is set. Collective."""
    folder = run_plan.config.data.stage
    if folder is None:
        yield run_plan
        return
    group = communicator.split(0) if run_plan.num_servers else communicator
    observe(communicator).monitor.doing("staging data")
    features, remarks = run_plan.info.features, list(run_plan.notes)
    # TensorFlow's own engines run without MPI, and the channel for their control messages is too slow for data.
    with staged(
        run_plan.dataset,
        folder,
        group,
        held_out=_held_out(run_plan, group.rank),
        passed_on=features.mpi,
        log=remarks.append,
    ) as dataset:
        yield dataclasses.replace(run_plan, dataset=dataset, notes=tuple(remarks))


def _held_out(run_plan: RunPlan, worker: int) -> range:
    """Return the samples of the held-out split that `worker` evaluates."""
    split = run_plan.dataset.evaluation_split
    num_samples = split.num_samples if split else 0
    if run_plan.info.features.synchronous:
        return pass_slice(num_samples, worker, run_plan.num_workers)
    return range(num_samples if worker == 0 else 0)


def _shared_out(run_plan: RunPlan, hosts: Sequence[str]) -> RunPlan:
    """Return the run with one share of the training split per node if --shuffle local is set."""
    if run_plan.config.data.shuffle != "local":
        return run_plan
    dataset = shared_out(run_plan.dataset, hosts[: run_plan.num_workers], run_plan.worker_batch)
    note = f"each of {len(set(dataset.nodes))} nodes shuffles and reads its own share of the training samples"
    return dataclasses.replace(run_plan, dataset=dataset, notes=(*run_plan.notes, note))


def context_of(run_plan: RunPlan, communicator: Observed) -> Context:
    """Return the strategy's view of the job; its traffic counts as that of the exchange."""
    return Context(
        info=run_plan.info,
        communicator=communicator.for_purpose(EXCHANGE),
        num_workers=run_plan.num_workers,
        num_servers=run_plan.num_servers,
        exchange=run_plan.config.exchange,
        optimizer=run_plan.config.optimizer,
        elastic=run_plan.config.elastic,
        deterministic=run_plan.config.run.deterministic,
        num_steps=run_plan.num_steps,
        steps_per_epoch=run_plan.steps_per_epoch,
        weight=run_plan.weight_of(communicator.rank) if communicator.rank < run_plan.num_workers else 1.0,
    )


def _check_same_start(run_plan: RunPlan, communicator: Communicator, software: dict[str, str]) -> None:
    config = run_plan.config
    facts = {f"version of {name}": version for name, version in software.items()}
    facts["data manifest"] = run_plan.dataset.checksum
    facts |= {f"--{key}": str(value) for key, value in flatten(config).items() if key != "run-dir"}
    control.check_same_start(facts, communicator)
