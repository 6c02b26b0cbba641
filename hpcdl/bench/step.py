"""`hpcdl bench step`: a model's step with and without exchange; `python -m hpcdl.bench.step FOLDER` is one rank."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.cluster import supervise as local
from hpcdl.comm.observed import EXCHANGE, observe
from hpcdl.config.load import Layer, as_toml_values, load
from hpcdl.config.schema import StepBenchConfig
from hpcdl.core.errors import UsageError
from hpcdl.core.files import read_json, write_json
from hpcdl.core.paths import own_program
from hpcdl.core.protocols import Communicator
from hpcdl.core.statistics import estimate, mean_of_known
from hpcdl.core.units import IMAGES, SAMPLES
from hpcdl.data.dataset import open_dataset
from hpcdl.models.spec import check_model_spec, model_name
from hpcdl.node.plan import launch_plan
from hpcdl.node.profile import find_profile
from hpcdl.node.topology.machines import read_topology
from hpcdl.strategies.base import Context, Strategy, StrategyInfo, check_ranks
from hpcdl.strategies.table import find_strategy

CONFIG_FILE = "config.json"
RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Medians in seconds over `steps` steps of each kind; a step takes as long as its slowest rank.

    `efficiency` is the median step without exchange over the median step with it. `samples` are the images/s of each
    step with exchange, over all workers, and `counted` says what these count; `loss` is that of the initial weights on
    the first batch, on rank 0. What steps without exchange are needed for is None where they were left out.
    """

    model: str
    strategy: str
    ranks: int
    workers: int
    batch_size: int
    step_seconds: float
    compute_seconds: float | None
    exposed_communication_seconds: float | None
    efficiency: float | None
    steps: int
    images_per_second: float
    counted: str
    samples: list[float]
    loss: float
    bytes_sent_per_step: float | None
    peak_memory_bytes: int


def run(config: StepBenchConfig) -> StepResult:
    """Measure on fresh ranks of this node."""
    info, num_workers = _checked(config)
    topology = read_topology()
    profile = find_profile(config.run.profile, model_name(config.model.model), topology)
    plan = launch_plan(topology, profile.settings if profile else None, config.run.ranks, config.run.ranks)
    with tempfile.TemporaryDirectory(prefix="hpcdl-bench-") as name:
        folder = Path(name)
        write_json(folder / CONFIG_FILE, as_toml_values(config))
        command = own_program("hpcdl.bench.step", name)
        local.start(plan, command, folder=folder / "ranks", mpi=info.features.mpi)
        gathered = read_json(folder / RESULT_FILE)
    return _summary(config, num_workers, gathered)


def _checked(config: StepBenchConfig) -> tuple[StrategyInfo, int]:
    info = find_strategy(config.exchange.strategy)
    if not info.features.synchronous or (info.name != "single" and not info.features.mpi):
        raise UsageError(f"bench step measures synchronous strategies over MPI, not {info.name!r}; use `hpcdl train`")
    servers = config.exchange.servers if info.features.servers else 0
    num_workers = check_ranks(info, ranks=config.run.ranks, servers=servers)
    check_model_spec(config.model.model)
    if config.run.data is not None:
        open_dataset(str(config.run.data))
    return info, num_workers


def _summary(config: StepBenchConfig, num_workers: int, gathered: list[dict[str, Any]]) -> StepResult:
    workers = gathered[:num_workers]
    slowest = {kind: [max(column) for column in zip(*(rank[kind] for rank in workers), strict=True)]
               for kind in ("with_exchange", "without_exchange")}  # fmt: skip
    step_s = statistics.median(slowest["with_exchange"])
    compute_s = statistics.median(slowest["without_exchange"]) if slowest["without_exchange"] else None
    samples = config.run.batch_size * config.exchange.accumulate * num_workers
    rates = [samples / seconds for seconds in slowest["with_exchange"]]
    return StepResult(
        model=config.model.model,
        strategy=config.exchange.strategy,
        ranks=config.run.ranks,
        workers=num_workers,
        batch_size=config.run.batch_size,
        step_seconds=step_s,
        compute_seconds=compute_s,
        exposed_communication_seconds=None if compute_s is None else max(step_s - compute_s, 0.0),
        efficiency=None if compute_s is None else compute_s / step_s,
        steps=len(rates),
        images_per_second=estimate(rates).mean,
        counted=workers[0]["counted"],
        samples=rates,
        loss=workers[0]["first_loss"],
        bytes_sent_per_step=mean_of_known([rank["bytes_sent_per_step"] for rank in workers]),
        peak_memory_bytes=max(rank["peak_memory_bytes"] for rank in workers),
    )


def measure_on_rank(config: StepBenchConfig, communicator: Communicator, folder: Path) -> None:
    """One rank's part; rank 0 writes the result of all. Collective."""
    info, num_workers = _checked(config)
    context = Context(
        info=info,
        communicator=observe(communicator).for_purpose(EXCHANGE),
        num_workers=num_workers,
        num_servers=config.run.ranks - num_workers,
        exchange=config.exchange,
        optimizer=config.optimizer,
        deterministic=config.run.deterministic,
    )
    from hpcdl.strategies.table import load_strategy

    strategy = load_strategy(info)
    group = communicator.split(0 if context.is_worker else 1) if context.num_servers else communicator
    own = _work(config, context, strategy, group) if context.is_worker else strategy.server(context).serve()
    gathered = communicator.allgather_json(own)
    if communicator.rank == 0:
        write_json(folder / RESULT_FILE, gathered)


def _work(config: StepBenchConfig, context: Context, strategy: Strategy, group: Communicator) -> dict[str, Any]:
    from hpcdl.training.session import runtime

    runtime.import_tensorflow()
    from hpcdl.models.load import load_model
    from hpcdl.training.loop import measure
    from hpcdl.training.loop.results import peak_memory_bytes
    from hpcdl.training.optimization.optimizers import build_optimizer

    runtime.configure(deterministic=config.run.deterministic, seed=config.run.seed, precision=config.model.precision)
    dataset = open_dataset(str(config.run.data)) if config.run.data else None
    model = load_model(
        config.model.model,
        classes=config.model.classes or (dataset.num_classes if dataset else None),
        input_shape=dataset.sample_shape if dataset else None,
    )
    batch_size = config.run.batch_size * config.exchange.accumulate
    batches: Iterator[Any] = measure.made_up_batches(model, batch_size, config.run.seed + group.rank)
    if dataset is not None:
        from hpcdl.data.read.pipeline import training_batches

        stream = training_batches(
            dataset, batch_size=batch_size, worker=group.rank, num_workers=group.size, seed=config.run.seed
        )
        batches = iter(stream)
    worker = strategy.worker(context)
    worker.start(model.weights)
    seen = observe(context.communicator).observation
    before = seen.traffic()
    times = measure.measure_steps(
        model,
        lambda: build_optimizer(config.optimizer, model.trainable_variables),
        worker,
        batches,
        group,
        num_steps=config.run.steps,
        warmup_steps=config.run.warmup_steps,
        accumulate=config.exchange.accumulate,
        exchange_only=config.run.exchange_only,
    )
    sent = (seen.traffic() - before).per_step(config.run.steps + config.run.warmup_steps)
    worker.finish()
    return {
        **dataclasses.asdict(times),
        "counted": dataset.counted if dataset else IMAGES if len(model.input_shape) == 4 else SAMPLES,
        "bytes_sent_per_step": sent["bytes_sent_per_step"],
        "peak_memory_bytes": peak_memory_bytes(),
    }


def main() -> None:
    """Entry of a rank process."""
    from hpcdl.training.session.rank import leave, supervised

    folder = Path(sys.argv[1])
    config = load(StepBenchConfig, [Layer(origin=CONFIG_FILE, values=read_json(folder / CONFIG_FILE))]).config

    leave(supervised(lambda communicator, watch: measure_on_rank(config, communicator, folder)))


if __name__ == "__main__":
    main()
