"""All checks of a run that are possible before ranks start and before anything is written."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcdl.checkpoint.parity import NONE
from hpcdl.cluster.batch.systems import has_own_nodes
from hpcdl.config.forms import OFF
from hpcdl.config.load import Config, ResolvedConfig, flatten, replace, site_rules
from hpcdl.config.schema import CheckpointConfig, DataConfig, RunConfig, StepBenchConfig, TrainConfig
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import Refusals, UsageError
from hpcdl.core.storage.files import open_regular
from hpcdl.core.units import counted
from hpcdl.data.format.dataset import PREFIX, Dataset, open_dataset
from hpcdl.data.format.manifest import may_be_picture
from hpcdl.data.format.order import NO_SHIFT, Shift, pass_slice, steps_per_epoch
from hpcdl.data.read.windows import open_stream
from hpcdl.models.table import check_function, check_model_spec, parse_function
from hpcdl.node.engine import check_library
from hpcdl.run.faults import check_injected, check_possible
from hpcdl.run.groups import check_groups
from hpcdl.run.schedules import Schedule, build_schedule
from hpcdl.run.trained_data import check_objective, unmeasured_target
from hpcdl.strategies.base.strategy import StrategyInfo, check_ranks
from hpcdl.strategies.refusals import (
    check_allowed,
    check_compression,
    check_elastic,
    check_exchange,
    check_model,
    check_optimizer,
    check_steps_per_call,
    check_unused,
)
from hpcdl.strategies.table import find_strategy


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that can start. Steps are optimizer steps; `global_batch` is samples per step over all workers."""

    config: TrainConfig
    info: StrategyInfo
    dataset: Dataset
    num_workers: int
    num_servers: int
    steps_per_epoch: int
    num_steps: int
    schedule: Schedule
    origins: Mapping[str, str]
    """Where each setting of `config` comes from."""
    notes: tuple[str, ...] = ()
    """Messages shown at the start, beside the rule that updates the weights."""

    @property
    def resolved(self) -> ResolvedConfig[TrainConfig]:
        """The settings with their origins, as run.toml holds them."""
        return ResolvedConfig(config=self.config, origins=self.origins)

    @property
    def worker_batch(self) -> int:
        """The largest number of samples per optimizer step on one worker."""
        return -(-self.global_batch // self.num_workers)

    @property
    def global_batch(self) -> int:
        """The number of samples per optimizer step over all workers."""
        return global_batch_of(self.config, self.num_workers)

    def samples_of(self, worker: int) -> int:
        """Return the number of samples per optimizer step on `worker`."""
        return len(pass_slice(self.global_batch, worker, self.num_workers))

    def slices_of(self, worker: int) -> tuple[int, ...]:
        """Return the sizes of the parts of a worker's batch, each of which it computes at once."""
        samples, parts = self.samples_of(worker), self.config.exchange.accumulate
        if self.config.data.keep_batch is not None and self.info.features.accumulation:
            # Fewer workers have more samples each: no part may exceed the batch that fits in memory.
            parts = min(max(parts, -(-samples // self.config.data.batch_size)), samples)
        return tuple(len(pass_slice(samples, part, parts)) for part in range(parts))

    def weight_of(self, worker: int) -> float:
        """Return the weight of a worker's mean over its samples in the mean over the workers."""
        return self.samples_of(worker) * self.num_workers / self.global_batch

    def sample_ids(self, step: int, worker: int, shift: Shift = NO_SHIFT) -> list[int]:
        """Return the ids, within the training split, of the samples that `worker` takes at `step`."""
        stream = open_stream(
            self.dataset,
            batch_size=self.worker_batch,
            worker=worker,
            num_workers=self.num_workers,
            seed=self.config.run.seed,
            global_batch=self.config.data.keep_batch,
            shift=shift,
        )
        try:
            return [int(sample) for sample in stream.ids(step)]
        finally:
            stream.close()


def _check_checkpoints(resolved: ResolvedConfig[TrainConfig], info: StrategyInfo) -> None:
    """Raise UsageError for settings of checkpoints that others must go with."""
    checkpoint = resolved.config.checkpoint
    if checkpoint.local_checkpoint_every and not checkpoint.elastic:
        raise UsageError("--local-checkpoint-every keeps what new ranks continue from: add --elastic, or leave it out")
    check_redundancy(checkpoint, info)


def check_redundancy(checkpoint: CheckpointConfig, info: StrategyInfo) -> None:
    """Raise UsageError if redundancy is requested without copies in memory, or if ranks cannot exchange copies."""
    if checkpoint.local_checkpoint_redundancy == NONE:
        return
    flag = f"--local-checkpoint-redundancy {checkpoint.local_checkpoint_redundancy}"
    if not checkpoint.local_checkpoint_every:
        raise UsageError(f"{flag} is for copies in the nodes' memory: add --local-checkpoint-every N, or leave it out")
    if not info.features.synchronous or not info.features.mpi:
        raise UsageError(
            f"{flag}: {info.name} has no steps at which all ranks can exchange copies over MPI; leave it out, and "
            "save to the file system more often (--checkpoint-every)"
        )


def _check_installed(run: RunConfig) -> None:
    """Raise UsageError if a package or library that these settings need is missing."""
    if run.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tensorboard needs the package tensorboard; pip install 'hpcdl[tensorboard]'")
    check_library(run.allocator)


def keeps_bytes(dataset: Dataset) -> bool:
    """Return whether --scale auto leaves bytes of an input unchanged, because they are not pictures."""
    return dataclasses.replace(dataset, scale=AUTO).keeps_bytes


def check_scale(dataset: Dataset, config: DataConfig) -> None:
    """Raise UsageError if bytes of an input may be a grey picture or numbers, and the user did not say which."""
    if config.scale != "auto":
        none = all(field.dtype != "uint8" for field in dataset.inputs)
        if config.scale == "none" and none and not config.preprocess:
            raise UsageError("--scale none keeps bytes (uint8) as they are, and no input has such; leave it out")
        return
    for field in dataset.inputs:
        if (
            field.dtype == "uint8"
            and field.kind == "numbers"
            and field.normalise == "none"
            and may_be_picture(field.shape)
        ):
            shape = "x".join(map(str, field.shape))
            raise UsageError(
                f"{config.data}: is the input {field.name} ({shape} uint8) a picture or a table of numbers? Give "
                "--scale 0..1 (bytes divided by 255) or --scale none (bytes as they are)"
            )


def check_network(config: TrainConfig, dataset: Dataset) -> None:
    """Raise UsageError if a known network does not accept these samples or classes, unless they are preprocessed."""
    if config.data.preprocess or len(dataset.inputs) > 1:
        return
    classes = config.model.classes or dataset.num_classes
    check_model_spec(config.model.model, classes=classes, input_shape=dataset.sample_shape)


def prepare(resolved: ResolvedConfig[TrainConfig]) -> RunPlan:
    """Check names, data and arithmetic of a run, and return its plan. Raises errors meant for the user."""
    info, dataset = _named(resolved)
    resolved = with_own_period(resolved, info)  # before the checks, which must see it
    config = resolved.config
    num_workers, num_servers = check_strategy(info, config)
    check_unused(info, flatten(config), resolved.origins)
    check_steps_per_call(info, config.run.steps_per_call)
    check_injected(resolved)
    if config.run.epochs is not None and config.run.steps is not None:
        raise UsageError("--epochs and --steps exclude each other; give one of them")
    _check_checkpoints(resolved, info)
    _check_installed(config.run)
    check_possible(
        config.safety.inject,
        config.run.ranks,
        dataset,
        family=info.family,
        num_workers=num_workers,
        sees_messages=info.features.mpi,
    )
    _check_data(resolved, dataset)
    num_samples = dataset.train_split.num_samples
    global_batch = global_batch_of(config, num_workers)
    check_keep_batch(info, config, num_workers)
    if global_batch > num_samples:
        per_worker = config.data.batch_size * config.exchange.accumulate
        each = f"{counted(num_workers, 'worker')} x {per_worker} samples (--batch-size x --accumulate)"
        each += f" = {global_batch} a step"
        kept = config.data.keep_batch
        raise UsageError(
            f"{each if kept is None else f'--keep-batch {kept}'}, "
            f"but {config.data.data} has {num_samples} to train on; use fewer ranks or a smaller batch"
        )
    per_epoch = steps_per_epoch(num_samples, global_batch)
    num_steps = config.run.steps or per_epoch * (config.run.epochs or 1)
    schedule = build_schedule(
        config.optimizer, global_batch=global_batch, num_steps=num_steps, steps_per_epoch=per_epoch
    )
    # Only now: the limits hold for the highest rate, which depends on the global batch.
    check_averaging(info, resolved, num_workers, schedule.peak)
    return RunPlan(
        config=config,
        info=info,
        dataset=dataset,
        num_workers=num_workers,
        num_servers=num_servers,
        steps_per_epoch=per_epoch,
        num_steps=num_steps,
        schedule=schedule,
        origins=resolved.origins,
    )


def _check_data(resolved: ResolvedConfig[TrainConfig], dataset: Dataset) -> None:
    """Raise UsageError if model, loss, changes of samples or staging do not fit the data."""
    config = resolved.config
    if config.model.classes is not None and config.model.classes < (dataset.num_classes or 0):
        raise UsageError(
            f"--classes {config.model.classes}, but {config.data.data} has labels of {dataset.num_classes} classes; "
            f"leave --classes out, or give {dataset.num_classes} or more"
        )
    check_network(config, dataset)
    check_objective(config.objective, dataset)
    check_changes(config.data, dataset)
    # A file, such as a study's, may be tried on other data: there the ranks warn.
    if resolved.origins["target-accuracy"] == "flag" and (why := unmeasured_target(config.objective, dataset)):
        raise UsageError(why)
    if dataset.folder is None and resolved.origins["stage"] == "flag":
        raise UsageError(f"--stage {config.data.stage}: {dataset.name} has no files to copy; leave it out")


def _named(resolved: ResolvedConfig[TrainConfig]) -> tuple[StrategyInfo, Dataset]:
    """Return strategy and data set. Raises one UsageError for all unknown names, functions, files and data sets."""
    config = resolved.config
    refusals = Refusals()
    info: StrategyInfo | None = None
    with refusals.gathered():
        info = find_strategy(config.exchange.strategy)
    with refusals.gathered():
        check_model_spec(config.model.model)
    if config.data.preprocess:
        with refusals.gathered():
            check_function(parse_function(config.data.preprocess, "preprocess"))
    if config.model.init_weights is not None:
        with refusals.gathered():
            check_saved_model(config.model.init_weights)
    dataset: Dataset | None = None
    with refusals.gathered():
        if resolved.origins["data"].startswith("run ("):
            _check_data_of_run(config.data.data)
        dataset = open_dataset(config.data.data, seed=config.run.seed, verified=config.data.verify_data)
    refusals.raise_all()
    assert info is not None and dataset is not None  # otherwise an error was raised
    return info, dataset


def _check_data_of_run(data: str) -> None:
    """Raise UsageError if the data of a run to resume are not found: a relative path counts from where it began."""
    if data.startswith(PREFIX) or not data or Path(data).expanduser().is_dir():
        return
    there = "" if Path(data).expanduser().is_absolute() else "type this in the folder in which the run began, or "
    raise UsageError(f"the run began with --data {data}, which is not found here; {there}give --data with its new path")


def check_strategy(info: StrategyInfo, config: TrainConfig | StepBenchConfig) -> tuple[int, int]:
    """Return the numbers of workers and servers, after all checks of the strategy's settings that need no data."""
    num_servers = config.exchange.servers if info.features.servers else 0
    num_workers = check_ranks(info, ranks=config.run.ranks, servers=num_servers)
    check_exchange(info, config.exchange, num_workers=num_workers)
    check_compression(info, config.exchange.compress, config.model.precision)
    check_optimizer(info, config.optimizer, config.model.precision)
    check_model(info, config.model, config.run.trace if isinstance(config, TrainConfig) else OFF)
    rules = site_rules()
    check_allowed(info, rules.forbid_strategies, rules.origin)
    check_model_spec(config.model.model)
    return num_workers, num_servers


def with_own_period(resolved: ResolvedConfig[Config], info: StrategyInfo) -> ResolvedConfig[Config]:
    """Return the settings with the strategy's own period, if it has one and the user set no other.

    The saved settings of a run must hold it, because reports and forecasts use it.
    """
    period, origin = info.features.default_period, f"strategy {info.name}"
    if between := flatten(resolved.config)["period-between"]:
        period, origin = between, f"--period-between, from {resolved.origins['period-between']}"
    if period == 1 or resolved.origins["period"] != "default":
        return resolved
    origins = {**resolved.origins, "period": origin}
    return ResolvedConfig(config=replace(resolved.config, period=period), origins=origins)


def check_averaging(
    info: StrategyInfo,
    resolved: ResolvedConfig[TrainConfig] | ResolvedConfig[StepBenchConfig],
    num_workers: int,
    peak_rate: float,
) -> None:
    """Raise ConfigError if groups or the rates of an elastic strategy do not fit its workers."""
    config = resolved.config
    check_groups(info, config)
    num_averaged = num_workers // config.elastic.groups if info.features.groups else num_workers
    check_elastic(info, config, resolved.origins, num_workers=num_averaged, peak_rate=peak_rate)


def global_batch_of(config: TrainConfig, num_workers: int) -> int:
    """Return the number of samples per optimizer step over all workers."""
    return config.data.keep_batch or config.data.batch_size * config.exchange.accumulate * num_workers


def check_keep_batch(info: StrategyInfo, config: TrainConfig, num_workers: int) -> None:
    """Raise UsageError if --keep-batch has no meaning, or leaves a worker without a sample."""
    kept = config.data.keep_batch
    if kept is None:
        return
    flag = f"--keep-batch {kept}"
    if not info.features.equals_single:
        raise UsageError(
            f"{flag}: the workers of {info.name} take steps of their own, of --batch-size samples each; leave it out"
        )
    if kept < num_workers:
        raise UsageError(f"{flag}: {num_workers} workers share that; give each at least one sample, or use fewer ranks")
    if config.data.shuffle != "global":
        raise UsageError(
            f"{flag} --shuffle {config.data.shuffle}: each node takes its own part of a step; leave one out"
        )


def check_changes(config: DataConfig, dataset: Dataset) -> None:
    """Raise UsageError if inputs cannot be scaled, or images augmented, as requested."""
    check_scale(dataset, config)
    if config.crop_padding and config.random_resized_crop:
        raise UsageError("--crop-padding and --random-resized-crop both cut a window out; give one of them")
    if not dataset.pictures and (config.flip or config.crop_padding or config.random_resized_crop):
        flags = "--flip, --crop-padding and --random-resized-crop"
        raise UsageError(f"{flags} are for images with a class; {config.data} has named fields: use --preprocess")
    if config.crop_padding and config.crop_padding >= min(dataset.sample_shape[:2]):
        height, width = dataset.sample_shape[:2]
        raise UsageError(
            f"--crop-padding {config.crop_padding}: a window could hold nothing of an image of {height}x{width}; "
            f"give less than {min(height, width)}, such as 4"
        )


_SAVED_MODELS = {".keras": b"PK", ".h5": b"\x89HDF", ".hdf5": b"\x89HDF"}
"""The first bytes of model files that Keras loads, by the file name's suffix."""


def check_saved_model(path: Path) -> None:
    """Raise UsageError if --init-weights names no loadable model; a pipe, for example, would block every rank."""
    begins_with = _SAVED_MODELS.get(path.suffix)
    if path.is_dir():
        raise UsageError(f"--init-weights {path}: a folder; give a .keras file, as {path / 'model.keras'} of a run")
    try:
        with open_regular(path) as file:
            holds_model = begins_with is not None and file.read(len(begins_with)) == begins_with
    except (OSError, ValueError) as error:
        raise UsageError(f"--init-weights {path}: {getattr(error, 'strerror', None) or error}") from error
    if not holds_model:
        raise UsageError(f"--init-weights {path}: not a saved model; give a .keras file, as a run's model.keras")
    from hpcdl.models.saved import check_saved  # loads h5py, which most runs do not need here

    try:
        check_saved(path, code=False)  # the weights alone are read if it holds code
    except ValueError as error:
        raise UsageError(f"--init-weights {path}: {error}") from error


def check_open_servers(info: StrategyInfo, *, allowed: bool) -> None:
    """Raise UsageError if other users of the nodes could reach servers that have no authentication.

    Asks the batch system, so the starting process calls it once; neither every rank nor the plan of a study does.
    """
    if info.features.open_servers and not allowed:
        check_own_nodes(f"--strategy {info.name}", "use ring or ps")


def check_own_nodes(what: str, instead: str) -> None:
    """Raise UsageError if `what` would open TensorFlow servers on nodes that other users may share."""
    if has_own_nodes(os.environ):
        return
    raise UsageError(
        f"{what}: TensorFlow's gRPC servers authenticate nobody, and no batch system says "
        "that these nodes are yours alone; take such nodes (sbatch --exclusive, qsub -l place=excl), add --allow-grpc, "
        f"or {instead}"
    )


def rule_in_force(run_plan: RunPlan) -> str:
    """Return one line that describes how this run will update its weights."""
    values = flatten(run_plan.config)
    rule = next(iter(run_plan.info.features.optimizers), values["optimizer"])
    if rule in ("momentum", "nesterov"):
        rule += f" {values['momentum']:g}"
    workers = counted(run_plan.num_workers, "worker")
    each = f"{workers} x batch {values['batch-size']} ="
    if run_plan.config.data.keep_batch is not None:
        fewest = run_plan.samples_of(0)
        most = run_plan.worker_batch
        each = f"{workers} share" + (f" ({fewest} or {most} each)" if fewest < most else "")
    every = "an exchange at a period to be measured"
    if values["period"] != AUTO:
        every = "an exchange every " + ("step" if int(values["period"]) == 1 else f"{values['period']} steps")
    exchange = f", {every}" if run_plan.info.features.periodic else ""
    if values["period-within"]:
        exchange += f", inside a node every {values['period-within']}"
    return (
        f"{run_plan.info.name}: {each} {run_plan.global_batch} samples a step{exchange}; {rule}, "
        f"{run_plan.schedule.describe()}; "
        f"{run_plan.num_steps} steps, {run_plan.steps_per_epoch} an epoch{_left_out(run_plan)}"
    )


def _left_out(run_plan: RunPlan) -> str:
    """Say how many samples an epoch leaves out, if they are a tenth or more: they fill no whole step."""
    num_samples = run_plan.dataset.train_split.num_samples
    left = num_samples - run_plan.steps_per_epoch * run_plan.global_batch
    if (
        10 * left < num_samples
        or run_plan.num_steps < run_plan.steps_per_epoch
        or not run_plan.info.features.synchronous
    ):
        return ""
    return f", which leaves out {left} of the {num_samples} samples, others in each epoch"
