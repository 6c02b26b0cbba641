"""What every rank of a run does, whatever its role; no TensorFlow here, servers go without it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from hpcdl.config.load import flatten
from hpcdl.core import variables
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.core.records import RankRecord
from hpcdl.core.signals import StopRequest
from hpcdl.data.read.staging import resident, staged
from hpcdl.strategies.base import Context, Strategy, StrategyInfo
from hpcdl.training.launch.prepare import Prepared
from hpcdl.training.loop import results
from hpcdl.training.loop.journal import EventHandler
from hpcdl.training.session import runtime, safety

_MEASURED = ("bytes_sent_per_step", "bytes_received_per_step", "busy_seconds_per_step")
"""What a server says about itself that has a field of its own in the record."""


def run_rank(
    prepared: Prepared, communicator: Communicator, run_dir: Path, on_event: EventHandler | None = None
) -> None:
    """Work or serve, by rank. Collective over all ranks; on rank 0 `on_event` gets the journal's events."""
    if communicator.size != prepared.config.run.ranks:
        raise UsageError(f"--ranks {prepared.config.run.ranks}, but {communicator.size} were started")
    software = runtime.software_versions(communicator.library)
    _check_same_start(prepared, communicator, software)
    hosts = communicator.allgather_json(communicator.host)
    started = results.first_record(prepared, hosts, software, os.environ.get(variables.PROFILE, ""))
    unbound = communicator.allgather_json(runtime.binding_warning())
    warnings = [f"rank {rank}: {warning}" for rank, warning in enumerate(unbound) if warning]
    started = dataclasses.replace(started, warnings=[*started.warnings, *warnings])
    if communicator.rank < prepared.num_workers:
        runtime.import_tensorflow()
        from hpcdl.training.loop.worker import run_worker

        with _staged(prepared, communicator) as near:
            if prepared.config.elastic.groups > 1:  # from the node's own storage, where there is a copy on it
                near = dataclasses.replace(near, dataset=resident(near.dataset))
            communicator = run_worker(near, communicator, run_dir, started, on_event)
    else:
        communicator = _serve(prepared, communicator)
    communicator.barrier()


@contextlib.contextmanager
def _staged(prepared: Prepared, communicator: Communicator) -> Iterator[Prepared]:
    """The run on a copy of its data on each node's own storage, where --stage asks for that; collective over all."""
    folder = prepared.config.data.stage
    if folder is None:
        yield prepared
        return
    group = communicator.split(0) if prepared.num_servers else communicator
    with staged(prepared.dataset, folder, group) as dataset:
        yield dataclasses.replace(prepared, dataset=dataset)


def load_strategy(info: StrategyInfo) -> Strategy:
    """The strategy behind a table entry."""
    module, _, attribute = info.target.partition(":")
    strategy: Strategy = getattr(importlib.import_module(module), attribute)()
    return strategy


def context(prepared: Prepared, communicator: Communicator) -> Context:
    """What a strategy may know of the job."""
    return Context(
        info=prepared.info,
        communicator=communicator,
        num_workers=prepared.num_workers,
        num_servers=prepared.num_servers,
        exchange=prepared.config.exchange,
        optimizer=prepared.config.optimizer,
        elastic=prepared.config.elastic,
        deterministic=prepared.config.run.deterministic,
    )


def _serve(prepared: Prepared, communicator: Communicator) -> Communicator:
    for _ in range(1 if prepared.config.data.stage is None else 2):  # the workers' splits are collective over all
        communicator.split(1)
    # Signals go to every rank: the workers agree on the step at which all stop, and tell this server.
    StopRequest().install()
    server = load_strategy(prepared.info).server(context(prepared, communicator))
    details = server.serve()
    measured = {name: details.pop(name) for name in _MEASURED if name in details}
    own = RankRecord(
        rank=communicator.rank,
        host=communicator.host,
        role="server",
        peak_memory_bytes=results.peak_memory_bytes(),
        details={"bytes_sent": server.bytes_sent, **details},
        **measured,
    )
    if details.get("lost_workers"):
        communicator = communicator.survivors()
    results.gather_ranks(communicator, own)
    return communicator


def _check_same_start(prepared: Prepared, communicator: Communicator, software: dict[str, str]) -> None:
    config = prepared.config
    facts = {f"version of {name}": version for name, version in software.items()}
    facts["data manifest"] = prepared.dataset.checksum
    facts |= {f"--{key}": str(value) for key, value in flatten(config).items() if key != "run-dir"}
    safety.check_same_start(facts, communicator)
