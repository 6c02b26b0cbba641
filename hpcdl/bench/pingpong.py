"""`hpcdl bench pingpong`: one message back and forth between two ranks, by MPI or by TensorFlow's gRPC.

`python -m hpcdl.bench.pingpong FOLDER` is one rank.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hpcdl.bench.allreduce import one_way, parse_sizes
from hpcdl.bench.ranks import REQUEST_FILE, ReportProgress, as_started, launched, on_fresh_ranks, rank_program
from hpcdl.comm.observed import Observed
from hpcdl.config.load import Layer, as_toml_values, load, site_rules
from hpcdl.config.schema import PingpongBenchConfig
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.progress import progress
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.from_json import from_json
from hpcdl.core.units import format_bytes
from hpcdl.report.analysis.laws import AlphaBeta, alpha_beta
from hpcdl.run.plan import check_own_nodes
from hpcdl.strategies.refusals import check_allowed
from hpcdl.strategies.table import GRPC_WARNING, find_strategy

LONG_BYTES, LONG_REPEATS = 1 << 20, 5
"""Maximum repeats for messages above this size: they take long, and vary little."""
Trips = Callable[[int, int], tuple[list[float], list[float]]]
"""Takes bytes and repeats; returns on the first rank seconds of half round trips, and of the calls' overhead."""


@dataclass(frozen=True, kw_only=True)
class PingpongRow:
    """One size: median seconds of half a round trip, and the resulting bytes/s."""

    bytes: int
    seconds: float
    bytes_per_second: float
    repeats: int


@dataclass(frozen=True, kw_only=True)
class PingpongResult:
    """A link one way: `link` is alpha + beta n fitted to the rows.

    `call_seconds`: the cost per step of a grpc-* strategy for its call of TensorFlow's session, whatever it sends; None
    for MPI, which has no such call.
    """

    transport: str
    library: str
    ranks: Sequence[int]
    hosts: Sequence[str]
    nodes: int
    rows: Sequence[PingpongRow]
    link: AlphaBeta | None
    call_seconds: float | None
    warnings: Sequence[str]


def run(config: PingpongBenchConfig) -> PingpongResult | None:
    """Measure between two new ranks, on the job's first two nodes or on this one, or between two of a launcher's.

    Returns None on all ranks of a launcher but the first.
    """
    mpi = config.run.transport == "mpi"
    if (rank_place := launched()) is not None:
        result = as_started(
            rank_place, lambda: _check(config), lambda group: measure_on_rank(config, group, _no_progress), mpi=mpi
        )  # fmt: skip
        return result if rank_place.rank == 0 else None
    _check(config)
    with progress("messages", len(_sizes(config))) as bar:
        document = on_fresh_ranks("hpcdl.bench.pingpong", as_toml_values(config), 2, bar, mpi=mpi)
    return from_json(PingpongResult, document)


def _no_progress(done: int, what: str) -> None:
    """Do nothing: there is no progress bar."""


def _sizes(config: PingpongBenchConfig) -> list[int]:
    return parse_sizes(config.run.sizes, multiple_of=1)


def _check(config: PingpongBenchConfig) -> None:
    _sizes(config)
    if config.run.transport != "grpc":
        return
    rules = site_rules()
    for name in ("grpc-ps", "grpc-ring"):
        check_allowed(find_strategy(name), rules.forbid_strategies, rules.origin)
    if not config.run.allow_grpc:
        check_own_nodes("--transport grpc", "use --transport mpi")


def measure_on_rank(config: PingpongBenchConfig, world: Observed, on_progress: ReportProgress) -> PingpongResult:
    """Do one rank's part; every rank gets the result. Collective."""
    hosts = world.allgather_json(world.host)
    partner = choose_partner(hosts)
    member = world.rank in (0, partner)
    # Collective: ranks outside the pair must call it too.
    pair = world.split(0 if member else 1)
    rows: list[PingpongRow] = []
    calls: list[float] = []
    if member:
        trips = _TRANSPORTS[config.run.transport](world, pair)
        for size in _sizes(config):
            repeats = min(config.run.repeats, LONG_REPEATS) if size > LONG_BYTES else config.run.repeats
            pair.barrier()
            seconds, own_calls = trips(size, repeats)
            calls += own_calls
            if world.rank == 0:
                rows.append(_row(size, seconds))
                on_progress(len(rows), format_bytes(size))
    world.monitor.doing("waiting for the others")
    with world.monitor.patiently():
        world.barrier()
    fit = alpha_beta([row.bytes for row in rows], [row.seconds for row in rows])
    grpc = config.run.transport == "grpc"
    measured = PingpongResult(
        transport=config.run.transport,
        library=world.library if not grpc else "TensorFlow's gRPC",
        ranks=[0, partner],
        hosts=[hosts[0], hosts[partner]],
        nodes=len({hosts[0], hosts[partner]}),
        rows=rows,
        link=fit,
        call_seconds=statistics.median(calls) if calls else None,
        warnings=[GRPC_WARNING] if grpc else [],
    )
    # Only rank 0 has measured; all ranks return the same.
    return from_json(PingpongResult, world.allgather_json(dataclasses.asdict(measured))[0])


def choose_partner(hosts: Sequence[str]) -> int:
    """Return the partner of rank 0: the first rank on another node, else rank 1."""
    if len(hosts) < 2:
        raise UsageError("a message needs two ranks: leave the launcher out, or have it start two")
    return next((rank for rank, host in enumerate(hosts) if host != hosts[0]), 1)


def _row(num_bytes: int, seconds: Sequence[float]) -> PingpongRow:
    median_s = statistics.median(seconds)
    if median_s <= 0:
        raise HpcdlError(
            f"{format_bytes(num_bytes)}: the time of a message is lost in the noise of this node; give more --repeats"
        )
    return PingpongRow(
        bytes=num_bytes, seconds=median_s, bytes_per_second=num_bytes / median_s, repeats=len(seconds)
    )  # fmt: skip


def _by_mpi(world: Observed, pair: Communicator) -> Trips:
    """Return the trips by messages, sent like the strategies' own exchanges."""

    def trips(num_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
        first = pair.rank == 0
        # A prime period: bytes shifted by any power of two are noticed.
        buffer = (numpy.arange(num_bytes) % 251).astype(numpy.uint8) if first else numpy.zeros(num_bytes, numpy.uint8)
        seconds = one_way(pair, 1 - pair.rank, buffer, first=first, repeats=repeats)
        if not (buffer == (numpy.arange(num_bytes) % 251)).all():
            raise HpcdlError(f"other bytes came of {format_bytes(num_bytes)} by {pair.library} than had left")
        return seconds, []

    return trips


def _by_grpc(world: Observed, pair: Communicator) -> Trips:
    """Return the trips by tensors between TensorFlow's servers, on request of the first rank alone."""
    from hpcdl.supervision import runtime

    monitor = world.monitor
    monitor.doing("importing TensorFlow")
    runtime.import_tensorflow()
    from hpcdl.strategies.tensorflow_grpc.cluster import GrpcLink

    runtime.configure(deterministic=False, seed=0)
    link = GrpcLink(pair)

    def trips(num_bytes: int, repeats: int) -> tuple[list[float], list[float]]:
        if pair.rank > 0:
            return [], []
        with monitor.waiting_for("messages over gRPC", hidden=True):
            return link.trips(num_bytes, repeats)

    return trips


_TRANSPORTS: dict[str, Callable[[Observed, Communicator], Trips]] = {"mpi": _by_mpi, "grpc": _by_grpc}


def _on_rank(request: dict[str, Any], group: Observed, on_progress: ReportProgress) -> dict[str, Any]:
    config = load(PingpongBenchConfig, [Layer(origin=REQUEST_FILE, values=request)]).config
    return dataclasses.asdict(measure_on_rank(config, group, on_progress))


if __name__ == "__main__":
    rank_program(_on_rank)
