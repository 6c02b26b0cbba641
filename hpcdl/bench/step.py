"""`hpcdl bench step`: a model's step with and without exchange; `python -m hpcdl.bench.step FOLDER` is one rank."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcdl.bench.ranks import REQUEST_FILE, ReportProgress, as_started, launched, on_fresh_ranks, rank_program
from hpcdl.cluster.launchers import find_launcher
from hpcdl.cluster.launchers.base import ranks_per_node
from hpcdl.comm.observed import EXCHANGE, Observed
from hpcdl.config.load import Layer, ResolvedConfig, as_toml_values, load
from hpcdl.config.schema import StepBenchConfig
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import UsageError
from hpcdl.core.progress import NullProgress
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.from_json import from_json
from hpcdl.core.statistics import SURE, mean_of_known, quantiles
from hpcdl.core.units import IMAGES, SAMPLES
from hpcdl.data.format.dataset import open_dataset
from hpcdl.launch.train import with_ranks
from hpcdl.models.table import model_name
from hpcdl.node.machines import read_topology
from hpcdl.node.profile import Settings, find_profile
from hpcdl.run.groups import near_memory
from hpcdl.run.plan import check_averaging, check_open_servers, check_strategy
from hpcdl.strategies.base.strategy import Context, Strategy, StrategyInfo
from hpcdl.strategies.table import find_strategy, load_strategy


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Medians in seconds over `steps` steps of each kind.

    If workers wait for each other, a step takes as long as its slowest worker; for asynchronous strategies the medians
    are over the steps of all workers. `efficiency` is the median step without exchange over the median step with it.
    A middle half is first and third quartile of the steps, empty if none were measured. `distinguishable` says whether
    the steps with exchange differ from those without, by Mann and Whitney's test.
    `samples` are the images/s of each step with exchange, over all workers, and `counted` is their unit. `accelerators`
    has the number of workers per GPU name; `bucket_bytes` is the result of --bucket-size auto. `loss` is that of the
    initial weights on the first batch, on rank 0. Values that need steps without exchange are None if those were not
    measured.
    """

    model: str
    strategy: str
    ranks: int
    workers: int
    nodes: int
    batch_size: int
    step_seconds: float
    compute_seconds: float | None
    exposed_communication_seconds: float | None
    efficiency: float | None
    step_middle_half: Sequence[float]
    compute_middle_half: Sequence[float]
    distinguishable: bool | None
    steps: int
    images_per_second: float
    counted: str
    samples: Sequence[float]
    loss: float
    bytes_sent_per_step: float | None
    bucket_bytes: int | None = None
    peak_memory_bytes: int
    fast_kernels: Sequence[str] = ()
    accelerators: Mapping[str, int] = field(default_factory=dict)
    warnings: Sequence[str]


def run(resolved: ResolvedConfig[StepBenchConfig], begins: Callable[[int], object]) -> StepResult | None:
    """Measure on new ranks of this node or job, or on those of a launcher, where all but rank 0 get None.

    `begins` is called with the number of new ranks before they start.
    """
    info = find_strategy(resolved.config.exchange.strategy)
    if (rank_place := launched()) is not None:
        on_ranks = with_ranks(resolved, rank_place)
        result = as_started(
            rank_place,
            lambda: _check(info, on_ranks),
            lambda group: measure_on_rank(on_ranks.config, group),
            mpi=info.features.mpi,
        )
        return result if rank_place.rank == 0 else None
    _check(info, resolved)
    config = resolved.config
    request, settings = as_toml_values(config), _settings(config)
    begins(config.run.ranks)
    document = on_fresh_ranks(
        "hpcdl.bench.step", request, config.run.ranks, NullProgress(), settings=settings, mpi=info.features.mpi
    )
    return from_json(StepResult, document)


def _check(info: StrategyInfo, resolved: ResolvedConfig[StepBenchConfig]) -> None:
    config = resolved.config
    num_workers, _ = check_strategy(info, config)
    check_averaging(info, resolved, num_workers, config.optimizer.learning_rate)
    if info.features.periodic and config.elastic.period != 1:
        raise UsageError(
            f"--period {config.elastic.period}: bench step measures one step of {info.name}, with its exchange and "
            "without; leave it out, and divide the exchange by the period"
        )
    check_open_servers(info, allowed=config.run.allow_grpc)
    if config.run.data is not None:
        open_dataset(str(config.run.data))


def _settings(config: StepBenchConfig) -> Settings | None:
    """Return the settings of the requested profile, else those that --groups needs, as in training."""
    topology = read_topology()
    profile = find_profile(config.run.profile, model_name(config.model.model), topology)
    share = ranks_per_node(find_launcher().hosts(os.environ), config.run.ranks)
    return profile.settings if profile else near_memory(config.elastic.groups, share, topology)


def measure_on_rank(config: StepBenchConfig, communicator: Observed) -> StepResult:
    """Do one rank's part; every rank gets the result. Collective."""
    info = find_strategy(config.exchange.strategy)
    num_workers, num_servers = check_strategy(info, config)
    communicator.monitor.role = "worker" if communicator.rank < num_workers else "server"
    hosts = communicator.allgather_json(communicator.host)
    context = Context(
        info=info,
        communicator=communicator.for_purpose(EXCHANGE),
        num_workers=num_workers,
        num_servers=num_servers,
        exchange=config.exchange,
        optimizer=config.optimizer,
        elastic=config.elastic,
        deterministic=config.run.deterministic,
    )
    strategy = load_strategy(info)
    group = communicator.split(0 if context.is_worker else 1) if num_servers else communicator
    if context.is_worker:
        measured = _work(config, context, strategy, group, communicator)
    else:
        server = strategy.server(context)
        communicator.monitor.doing("serving")
        with communicator.monitor.patiently():
            server.serve()
        measured = {}
    return _summary(config, num_workers, len(set(hosts)), communicator.allgather_json(measured))


def _work(
    config: StepBenchConfig, context: Context, strategy: Strategy, group: Communicator, world: Observed
) -> dict[str, Any]:
    from hpcdl.supervision import runtime

    monitor = world.monitor
    monitor.doing("importing TensorFlow")
    runtime.import_tensorflow(fixed_shapes=True)
    from hpcdl.rank.results import peak_memory_bytes, refuse_shared_devices
    from hpcdl.step import measure
    from hpcdl.step.kernels.table import names_used, use_chosen_kernels
    from hpcdl.step.optimizers import build_optimizer
    from hpcdl.step.step import inside_engine
    from hpcdl.strategies.elastic.flat import FlatWorker

    monitor.doing("building the model")
    settings, features = config.run, context.info.features
    runtime.configure(deterministic=settings.deterministic, seed=settings.seed, precision=config.model.precision)
    # Before the model: some engines must be set up before TensorFlow makes its first tensor.
    worker = strategy.worker(context)
    refuse_shared_devices(context.info, group)
    worker.learning_rate = config.optimizer.learning_rate
    if isinstance(worker, FlatWorker):  # a center that has all its updates would accept no more
        worker.replica.total = 1 + context.num_workers * (settings.steps + settings.warmup_steps)
    model, batches, counted = _model_and_batches(config, group)
    choice = "off" if config.model.xla else config.model.fast_kernels
    kernels = use_chosen_kernels(model, choice, xla=features.keras_optimizer)
    count = _count(config, features.synchronous)
    scaled, variables = config.model.precision == "mixed_float16", model.trainable_variables
    kinds = measure.kinds_of_steps(
        model,
        lambda: build_optimizer(config.optimizer, variables, loss_scaling=scaled),
        worker,
        count,
        lambda: inside_engine(monitor, mpi=features.mpi, num_workers=group.size),
    )
    chosen = _chosen_buckets(config, worker, model, batches, group)
    # After the choice of buckets, whose messages belong to no step.
    before = monitor.traffic()
    monitor.doing("computing")
    times = measure.measure_steps(kinds, batches, group, count)
    # Messages of gRPC strategies are sent by TensorFlow, and nobody counts them.
    countable = features.mpi or group.size == 1
    sent = (monitor.traffic() - before).per_step(settings.steps + settings.warmup_steps, countable=countable)
    monitor.doing("leaving")
    with monitor.patiently():
        worker.finish()
    device = runtime.device_in_use()
    return {
        **dataclasses.asdict(times),
        "counted": counted,
        "bytes_sent_per_step": sent["bytes_sent_per_step"],
        "bucket_bytes": chosen,
        "peak_memory_bytes": peak_memory_bytes(),
        "fast_kernels": names_used(),
        "device": device.name,
        "warnings": [*worker.warnings, *kernels.warnings, *filter(None, [device.warning])],
    }


def _count(config: StepBenchConfig, synchronous: bool) -> Any:
    """Return how many steps of which kinds are measured, and how many in a row."""
    from hpcdl.step import measure

    return measure.StepCount(
        steps=config.run.steps,
        warmup_steps=config.run.warmup_steps,
        in_a_row=measure.TOGETHER if synchronous else measure.APART,
        accumulate=config.exchange.accumulate,
        exchange_only=config.run.exchange_only,
        xla=config.model.xla,
    )


def _chosen_buckets(
    config: StepBenchConfig, worker: Any, model: Any, batches: Iterator[Any], group: Communicator
) -> int | None:
    """Choose the bucket size of `worker` if it is `auto`, set it and return it; collective."""
    if config.exchange.bucket_size != AUTO:
        return None
    from hpcdl.step.bucket_size import TrialStep, choose_buckets
    from hpcdl.step.objective import Classification
    from hpcdl.step.step import build_step

    settings, accumulate = (config.model, config.exchange, config.optimizer), config.exchange.accumulate

    def build(optimizer: Any) -> Any:
        return build_step(model, optimizer, worker, Classification(), accumulate, xla=config.model.xla)

    step = TrialStep(model, settings, build, lambda: next(batches), [config.run.batch_size] * accumulate)
    choice = choose_buckets(worker, group, step, deterministic=config.run.deterministic)
    worker.bucket_bytes = choice.bucket_bytes
    return choice.bucket_bytes


def _model_and_batches(config: StepBenchConfig, group: Communicator) -> tuple[Any, Iterator[Any], str]:
    """Return the network, an endless iterator of this worker's batches, and the unit of its samples."""
    from hpcdl.models.load import load_model
    from hpcdl.step.measure import made_up_batches

    settings = config.run
    dataset = open_dataset(str(settings.data)) if settings.data else None
    model = load_model(
        config.model.model,
        classes=config.model.classes or (dataset.num_classes if dataset else None),
        input_shape=dataset.sample_shape if dataset else None,
    )
    batch_size = settings.batch_size * config.exchange.accumulate
    if dataset is None:
        counted = IMAGES if len(model.input_shape) == 4 else SAMPLES
        # Each worker has other samples, as in training.
        return model, made_up_batches(model, batch_size, settings.seed + group.rank), counted
    from hpcdl.data.read.pipeline import training_batches

    stream = training_batches(
        dataset, batch_size=batch_size, worker=group.rank, num_workers=group.size, seed=settings.seed
    )
    return model, iter(stream), dataset.counted


def _summary(
    config: StepBenchConfig, num_workers: int, num_nodes: int, gathered: Sequence[dict[str, Any]]
) -> StepResult:
    info = find_strategy(config.exchange.strategy)
    workers = gathered[:num_workers]
    with_exchange, without = (
        _seconds(workers, kind, together=info.features.synchronous) for kind in ("with_exchange", "without_exchange")
    )
    step_s = statistics.median(with_exchange)
    compute_s = statistics.median(without) if without else None
    samples = config.run.batch_size * config.exchange.accumulate
    steps = [*zip(*(rank["with_exchange"] for rank in workers), strict=True)]
    # All samples over the total time: a mean of rates would overweight fast steps.
    if info.features.synchronous:
        rates = [samples * num_workers / max(step) for step in steps]
        rate = samples * num_workers / statistics.fmean(map(max, steps))
    else:
        rates = [sum(samples / seconds for seconds in step) for step in steps]
        rate = sum(samples / statistics.fmean(rank["with_exchange"]) for rank in workers)
    return StepResult(
        model=config.model.model,
        strategy=config.exchange.strategy,
        ranks=config.run.ranks,
        workers=num_workers,
        nodes=num_nodes,
        batch_size=config.run.batch_size,
        step_seconds=step_s,
        compute_seconds=compute_s,
        exposed_communication_seconds=None if compute_s is None else max(step_s - compute_s, 0.0),
        efficiency=None if compute_s is None else compute_s / step_s,
        step_middle_half=quantiles(with_exchange, [0.25, 0.75]),
        compute_middle_half=quantiles(without, [0.25, 0.75]) if without else (),
        distinguishable=_differ(with_exchange, without) if without else None,
        steps=len(rates),
        images_per_second=rate,
        counted=workers[0]["counted"],
        samples=rates,
        loss=workers[0]["first_loss"],
        bytes_sent_per_step=mean_of_known([rank["bytes_sent_per_step"] for rank in workers]),
        bucket_bytes=workers[0]["bucket_bytes"],
        peak_memory_bytes=max(rank["peak_memory_bytes"] for rank in workers),
        fast_kernels=workers[0]["fast_kernels"],
        accelerators=dict(Counter(rank["device"] for rank in workers if rank["device"])),
        warnings=[*filter(None, [info.warning]), *workers[0]["warnings"]],
    )


def _seconds(workers: Sequence[dict[str, Any]], kind: str, *, together: bool) -> list[float]:
    """Return the seconds of the steps: those of each step's slowest worker, or every worker's own."""
    steps = [*zip(*(rank[kind] for rank in workers), strict=True)]
    return [max(step) for step in steps] if together else [step_s for step in steps for step_s in step]


def _differ(seconds: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether two kinds of steps differ by more than chance; one disturbed step does not decide it."""
    from scipy.stats import mannwhitneyu  # takes a second to load

    return float(mannwhitneyu(seconds, others).pvalue) < SURE


def _on_rank(request: dict[str, Any], group: Observed, on_progress: ReportProgress) -> dict[str, Any]:
    config = load(StepBenchConfig, [Layer(origin=REQUEST_FILE, values=request)]).config
    return dataclasses.asdict(measure_on_rank(config, group))


if __name__ == "__main__":
    rank_program(_on_rank)
