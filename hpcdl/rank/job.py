"""What every rank of a run does, whatever its role; no TensorFlow here, servers go without it."""

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
from hpcdl.run.faults import parse_faults, spoken_of
from hpcdl.run.fewer import workers_and_servers
from hpcdl.run.in_place import Fewer
from hpcdl.run.journal import EventHandler
from hpcdl.run.prepare import Prepared
from hpcdl.strategies.base.strategy import Context
from hpcdl.supervision import runtime, safety
from hpcdl.supervision.pace import WINDOWS, Eviction, PaceKeeper
from hpcdl.supervision.watch import Actions, Limits, Watch
from hpcdl.trace.recorder import recording


def run_rank(
    prepared: Prepared,
    communicator: Communicator,
    run_dir: Path,
    on_event: EventHandler | None = None,
    watch: Watch | None = None,
    fewer: Fewer | None = None,
) -> None:
    """Work or serve, by rank. Collective over all ranks; on rank 0 `on_event` gets the journal's events.

    `watch`, where there is one, watches this rank and gets the run's own limits. `fewer`: those that are left go on in
    place when others are lost.
    """
    if communicator.size != prepared.config.run.ranks:
        raise UsageError(f"--ranks {prepared.config.run.ranks}, but {communicator.size} were started")
    communicator = observe(communicator)
    communicator.observation.role = "worker" if communicator.rank < prepared.num_workers else "server"
    software = runtime.software_versions(communicator.library)
    _check_same_start(prepared, communicator, software)
    injection = Injection(prepared.config.safety.inject, communicator.observation, run_dir)
    communicator = injection.impaired(communicator)
    with recording(injection.trace_beside(prepared.config.run.trace), communicator, run_dir):
        _run_rank(prepared, communicator, run_dir, on_event, watch, software, injection, fewer)


def _run_rank(
    prepared: Prepared,
    communicator: Observed,
    run_dir: Path,
    on_event: EventHandler | None,
    watch: Watch | None,
    software: dict[str, str],
    injection: Injection,
    fewer: Fewer | None,
) -> None:
    hosts = communicator.allgather_json(communicator.host)
    prepared = _shared_out(prepared, hosts)
    watch = watch or Watch(observation=communicator.observation, folder=run_dir, actions=Actions(end=_never))
    watch.limits = Limits(stall_s=prepared.config.safety.stall_timeout, busy_s=prepared.config.safety.busy_timeout)
    watch.hosts = dict(enumerate(hosts))
    if not prepared.info.features.synchronous:  # worker 0 evaluates and keeps the center
        seen = communicator.observation
        watch.actions.can_lose = lambda rank: rank != seen.first_left and rank < prepared.num_workers
    watch.besides = _pace_keeper(prepared, hosts, watch).look
    started = results.first_record(prepared, hosts, software, os.environ.get("HPCDL_PROFILE", ""))
    unbound = communicator.allgather_json(runtime.binding_warning())
    warnings = [f"rank {rank}: {warning}" for rank, warning in enumerate(unbound) if warning]
    warnings += spoken_of(parse_faults(prepared.config.safety.inject, communicator.size))
    started = dataclasses.replace(started, warnings=[*started.warnings, *warnings])
    context = dataclasses.replace(context_of(prepared, communicator), in_place=fewer is not None)
    if communicator.rank < prepared.num_workers:
        communicator.observation.doing("importing TensorFlow")
        runtime.import_tensorflow()
        from hpcdl.rank.worker import run_worker

        with injection, _staged(prepared, communicator) as near:
            if prepared.config.elastic.groups > 1:  # from the node's own storage, where there is a copy on it
                near = dataclasses.replace(near, dataset=resident(near.dataset, communicator.rank))
            near = dataclasses.replace(near, dataset=injection.readable(near.dataset))
            communicator = run_worker(near, communicator, context, run_dir, started, on_event, watch, injection, fewer)
    else:
        with injection:
            least = None if fewer is None else fewer.least
            communicator = serve(prepared, context, communicator, watch, least)
    communicator.observation.recorder.at_rest(communicator, last=True)
    communicator.barrier()


def _pace_keeper(prepared: Prepared, hosts: Sequence[str], watch: Watch) -> PaceKeeper:
    """Finds workers that are slow for as long as one may be silent; of TensorFlow's own servers nobody can tell."""
    config, num_workers = prepared.config, prepared.num_workers if prepared.info.features.mpi else 0
    evict_slow, least = config.checkpoint.evict_slow, config.checkpoint.min_workers or num_workers
    # An asynchronous worker can leave; without worker 0, which evaluates and keeps the center, new ranks go on.
    in_place = [rank > 0 and not prepared.info.features.synchronous for rank in range(num_workers)]

    def enough(rank: int, others: Sequence[int]) -> bool:
        if in_place[rank]:
            return len(others) >= least
        left_out = hosts.count(hosts[rank]) if len(set(hosts)) > 1 else 1
        return workers_and_servers(config, len(hosts) - left_out)[0] >= least

    def leave(rank: int, text: str) -> None:
        watch.evict(rank, text, in_place=in_place[rank])

    return PaceKeeper(
        observation=watch.observation,
        folder=watch.folder,
        window_s=config.safety.stall_timeout / WINDOWS,
        shares=[prepared.weight_of(rank) for rank in range(num_workers)],
        tell=lambda text: watch.actions.tell(text),
        eviction=None if evict_slow is None else Eviction(factor=evict_slow, enough=enough, leave=leave),
    )


def _never(error: RankError) -> None:
    """For a watch that nobody starts."""
    raise error


@contextlib.contextmanager
def _staged(prepared: Prepared, communicator: Communicator) -> Iterator[Prepared]:
    """The run on a copy of its data on each node's own storage, where --stage asks for that; collective over all."""
    folder = prepared.config.data.stage
    if folder is None:
        yield prepared
        return
    group = communicator.split(0) if prepared.num_servers else communicator
    observe(communicator).observation.doing("staging data")
    features, said = prepared.info.features, list(prepared.notes)
    # TensorFlow's own engines come without MPI, and what carries their control messages is too slow for data.
    with staged(
        prepared.dataset,
        folder,
        group,
        held_out=_held_out(prepared, group.rank),
        passed_on=features.mpi,
        say=said.append,
    ) as dataset:
        yield dataclasses.replace(prepared, dataset=dataset, notes=tuple(said))


def _held_out(prepared: Prepared, worker: int) -> range:
    """The samples of the held-out split that `worker` evaluates."""
    split = prepared.dataset.evaluation_split
    num_samples = split.num_samples if split else 0
    if prepared.info.features.synchronous:
        return pass_slice(num_samples, worker, prepared.num_workers)
    return range(num_samples if worker == 0 else 0)


def _shared_out(prepared: Prepared, hosts: Sequence[str]) -> Prepared:
    """The run with a share of the training split for each node, where --shuffle asks for that."""
    if prepared.config.data.shuffle != "local":
        return prepared
    dataset = shared_out(prepared.dataset, hosts[: prepared.num_workers], prepared.worker_batch)
    note = f"each of {len(set(dataset.nodes))} nodes shuffles and reads its own share of the training samples"
    return dataclasses.replace(prepared, dataset=dataset, notes=(*prepared.notes, note))


def context_of(prepared: Prepared, communicator: Observed) -> Context:
    """What a strategy may know of the job; what it sends counts as the exchange's."""
    return Context(
        info=prepared.info,
        communicator=communicator.for_purpose(EXCHANGE),
        num_workers=prepared.num_workers,
        num_servers=prepared.num_servers,
        exchange=prepared.config.exchange,
        optimizer=prepared.config.optimizer,
        elastic=prepared.config.elastic,
        deterministic=prepared.config.run.deterministic,
        weight=prepared.weight_of(communicator.rank) if communicator.rank < prepared.num_workers else 1.0,
    )


def _check_same_start(prepared: Prepared, communicator: Communicator, software: dict[str, str]) -> None:
    config = prepared.config
    facts = {f"version of {name}": version for name, version in software.items()}
    facts["data manifest"] = prepared.dataset.checksum
    facts |= {f"--{key}": str(value) for key, value in flatten(config).items() if key != "run-dir"}
    safety.check_same_start(facts, communicator)
