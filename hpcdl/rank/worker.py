"""A worker from the first check to the last file: builds model and strategy, trains, writes record and model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hpcdl.checkpoint import folders as checkpoints
from hpcdl.checkpoint import state
from hpcdl.checkpoint.background import BackgroundWork, most_patience_s, way_for
from hpcdl.checkpoint.folders import Facts, check_facts, kind_for
from hpcdl.checkpoint.interval import CheckpointInterval
from hpcdl.checkpoint.memory import LocalCopies, newest_common, place, recover
from hpcdl.checkpoint.parity import NO_REDUNDANCY, NONE, GroupParity, Redundancy
from hpcdl.cluster.supervise import LAUNCHED_BY_VARIABLE
from hpcdl.comm.agree import decided
from hpcdl.comm.observed import Observed
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import CorruptError, HpcdlError
from hpcdl.core.processes.collector import no_collection
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.run_record import HistoryPoint, RunRecord, from_json, write_record
from hpcdl.core.storage.disk import replacing
from hpcdl.core.units import counted
from hpcdl.data.format.dataset import Dataset
from hpcdl.faults.inject import Injection
from hpcdl.models.alike import difference
from hpcdl.models.check import doubts as model_doubts
from hpcdl.models.load import load_model
from hpcdl.node.accelerators import GpuUse
from hpcdl.rank import results
from hpcdl.rank.asynchronous import AsynchronousTrainer
from hpcdl.rank.initial import doubts as doubts_of_weights
from hpcdl.rank.parts import Parts, Trainer
from hpcdl.rank.shrink import InPlaceRecovery
from hpcdl.rank.synchronous import SynchronousTrainer
from hpcdl.run.journal import EchoJournal, EventHandler, FileJournal, Journal, NullJournal
from hpcdl.run.listing import step_to_resume
from hpcdl.run.plan import RunPlan, rule_in_force
from hpcdl.run.rundir import MODEL_FILE, changed_code
from hpcdl.run.schedules import mistaken_warm_up
from hpcdl.run.shrink import ShrunkRun
from hpcdl.run.trained_data import losses_of, unmeasured_target
from hpcdl.step.bucket_size import BucketChoice
from hpcdl.step.kernels.table import names_used, use_chosen_kernels
from hpcdl.step.preprocess import doubts as preprocess_doubts
from hpcdl.step.preprocess import fed, model_shapes, preprocessed
from hpcdl.strategies.base.strategy import Context
from hpcdl.strategies.table import load_strategy
from hpcdl.supervision import runtime
from hpcdl.supervision.watchdog import Watchdog, survivors

_SHOWN = {
    "step": ("loss", "images_per_second"),
    "epoch": ("loss", "accuracy", "val_loss", "val_accuracy"),
}


class TensorBoardWriter:
    """Receives a run's events and writes their numbers to `folder`."""

    def __init__(self, folder: Path) -> None:
        self._writer = tf.summary.create_file_writer(str(folder))

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Write the numbers of one event."""
        with self._writer.as_default(step=int(event.get("step", 0))):
            for name in _SHOWN.get(event["kind"], ()):
                if event.get(name) is not None:
                    tf.summary.scalar(f"{event['kind']}/{name}", event[name])
        self._writer.flush()


def run_worker(
    run_plan: RunPlan,
    communicator: Observed,
    context: Context,
    run_dir: Path,
    started: RunRecord,
    on_event: EventHandler | None,
    watch: Watchdog,
    injection: Injection,
    shrunk: ShrunkRun | None = None,
) -> Observed:
    """Train on this rank. Rank 0 writes the run directory, and passes the journal's events to `on_event`.

    With `shrunk` the survivors continue when ranks are lost. Return the group of the ranks left at the end. Collective
    over the workers, and at the end over all ranks.
    """
    with contextlib.ExitStack() as resting:  # garbage collection takes a fifth of the time for building and tracing
        resting.enter_context(no_collection())
        return _run_worker(
            run_plan, communicator, context, run_dir, started, on_event, watch, injection, shrunk, resting.close
        )


def _run_worker(
    run_plan: RunPlan,
    communicator: Observed,
    context: Context,
    run_dir: Path,
    started: RunRecord,
    on_event: EventHandler | None,
    watch: Watchdog,
    injection: Injection,
    shrunk: ShrunkRun | None,
    after_first_step: Callable[[], None],
) -> Observed:
    communicator.monitor.doing("building the model")
    config = run_plan.config
    leads = communicator.rank == 0
    threads = runtime.configure(
        deterministic=config.run.deterministic,
        # Dropout differs by rank; `Parts.start` gives every rank the same weights.
        seed=config.run.seed + communicator.rank,
        precision=config.model.precision,
    )
    record = dataclasses.replace(started, intra_op_threads=threads[0], inter_op_threads=threads[1])
    # Servers call `split(1)` meanwhile (rank/serve.py).
    group = communicator.split(0) if run_plan.num_servers else communicator
    journal: Journal = _journal(run_dir, config.run.tensorboard, on_event) if leads else NullJournal()
    # Before the model: some engines must be set up before TensorFlow makes its first tensor.
    worker = load_strategy(run_plan.info).worker(context)
    run_plan = dataclasses.replace(run_plan, dataset=preprocessed(run_plan.dataset, config.data))
    if line := fed(run_plan.dataset):
        journal.write("message", text=line)
    model = build_model(config, run_plan.dataset)
    choice = "off" if config.model.xla else config.model.fast_kernels
    kernels = use_chosen_kernels(model, choice, xla=run_plan.info.features.keras_optimizer)
    record = dataclasses.replace(record, fast_kernels=kernels.names, warnings=[*record.warnings, *kernels.warnings])
    results.refuse_shared_devices(run_plan.info, group)
    record = results.with_devices(record, group, config.model.precision)
    if config.model.init_weights is not None:
        journal.write("message", text=state.load_weights(model, config.model.init_weights))
    record = dataclasses.replace(record, warnings=[*record.warnings, *_doubts(config, run_plan.dataset, model, group)])
    interval, copies_in, work = _kept(run_plan, run_dir, group, record.nodes)
    copying = (interval, copies_in(group), work)
    parts = functools.partial(Parts, run_plan, model, worker, group, journal, run_dir, injection, *copying)
    kind = SynchronousTrainer if run_plan.info.features.synchronous else AsynchronousTrainer
    trainer: Trainer = kind(parts())
    # Resumes garbage collection: tracing in the first step makes the last of the many objects.
    trainer.parts.host.once_after = after_first_step
    record = _begun(trainer, group, record, run_dir, kernels.line())
    # The journal is looked up at each call: after a loss another may be in its place.
    watch.actions.log = lambda text: trainer.parts.journal.write("message", text=f"warning: {text}")
    if shrunk is None:
        communicator = _to_the_end(trainer, communicator, record, run_dir)
    else:
        communicator = InPlaceRecovery(
            trainer=trainer, world=communicator, context=context, record=record, run_dir=run_dir, watch=watch,
            shrunk=shrunk, train=_to_the_end, copies_in=copies_in,
            open_journal=lambda: _journal(run_dir, config.run.tensorboard, None),
        ).to_the_end()  # fmt: skip
    trainer.parts.journal.close()
    return communicator


def _begun(trainer: Trainer, group: Communicator, record: RunRecord, run_dir: Path, kernels: str) -> RunRecord:
    """Restore the trainer's position, log the settings in force, and return the initial record. Collective."""
    parts = trainer.parts
    run_plan, journal, limits = parts.run_plan, parts.journal, parts.config.checkpoint
    warnings = [*([run_plan.info.warning] if run_plan.info.warning else []), *parts.worker.warnings]
    warnings += run_plan.schedule.warnings
    warnings += mistaken_warm_up(parts.config.run.warmup_steps, parts.config.optimizer)
    if why := unmeasured_target(parts.config.objective, run_plan.dataset):
        warnings.append(why)
    resumed_from = _resume(trainer, run_dir, group, warnings) if limits.resume else None
    if resumed_from is not None:
        record = results.continued_record(record, run_dir, resumed_from)
        warnings += changed_code(run_dir, parts.config)
        if limits.allow:
            warnings.append(f"resumed with --allow {','.join(limits.allow)}: part of it ran with other settings")
        step = parts.host.position.step
        journal.write("message", text=f"resumed after step {step} of {run_plan.num_steps}")
    elif limits.resume and group.rank == 0:
        warnings += results.begun_again(run_dir)
    # The record of a resumed run may hold them already.
    record = dataclasses.replace(record, warnings=list(dict.fromkeys([*record.warnings, *warnings])))
    if group.rank == 0:
        write_record(run_dir, record)
    warning_lines = [f"warning: {warning}" for warning in record.warnings]
    for text in (rule_in_force(run_plan), *run_plan.notes, *([kernels] if kernels else []), *warning_lines):
        journal.write("message", text=text)
    return record


def _to_the_end(trainer: Trainer, communicator: Observed, record: RunRecord, run_dir: Path) -> Observed:
    """Train, and write record and model; return the group of the ranks that are left. Collective."""
    parts = trainer.parts
    with parts.saver.copies.until_over(), GpuUse(runtime.device_computed_on()) as gpu:
        outcome = trainer.run()
    run_plan, model, leads = parts.run_plan, parts.model, communicator.rank == 0
    rank_record = results.worker_record(communicator, outcome, parts.worker, run_plan, gpu)
    communicator = survivors(communicator, outcome.num_lost)
    ranks = results.gather_ranks(communicator, rank_record)
    communicator.monitor.doing("leaving")
    if leads:
        parts.saver.check_weights()  # before any file changes: an older model is better than one of NaN
        outcome.warnings += _save_finished(model, run_dir)
        for text in _chosen_allreduces(rank_record.details.get("allreduces", {}), run_plan):
            parts.journal.write("message", text=text)
        kernels = names_used() if outcome.clock.num_steps else record.fast_kernels
        record = dataclasses.replace(record, fast_kernels=kernels, warnings=parts.injection.settled(record.warnings))
        write_record(run_dir, results.finished_record(record, run_plan, outcome, ranks, _parameters(model)))
    return communicator


def _chosen_allreduces(names: Mapping[str, str], run_plan: RunPlan) -> Iterable[str]:
    """Yield a line that names what `auto` chose, by size of the buckets."""
    if names:
        by_name = [
            f"{name} for {', '.join(size for size in names if names[size] == name)}"
            for name in dict.fromkeys(names.values())
        ]
        timed = "" if run_plan.config.run.deterministic else "; of equally fast ones another run may take another"
        yield f"{run_plan.info.name} took {', '.join(by_name)}{timed}"


def _kept(
    run_plan: RunPlan, run_dir: Path, group: Observed, num_nodes: int
) -> tuple[CheckpointInterval, Callable[[Communicator], LocalCopies], BackgroundWork]:
    """Return the checkpoint interval, a factory of a group's in-memory copies, and how both are written."""
    limits = run_plan.config.checkpoint
    way, remark = way_for(limits.background, run_plan.info.features, run_plan.num_workers)

    def log(text: str) -> None:
        # Opened for each line: any rank may log here, and only the first one holds its journal open.
        with contextlib.closing(FileJournal(run_dir)) as journal:
            journal.write("message", text=text)

    if remark and group.rank == 0:
        log(remark)
    work = BackgroundWork(way, group.monitor, lambda text: log(f"rank {group.rank}: {text}"))
    folder = place(limits.local_checkpoint_folder, run_dir, os.environ.get(LAUNCHED_BY_VARIABLE, ""))
    most_s = most_patience_s(way, run_plan.config.safety.stall_timeout)
    interval = CheckpointInterval(
        limits.checkpoint_every, node_mtbf_s=limits.mtbf, num_nodes=num_nodes, most_patience_s=most_s
    )

    def warn(text: str) -> None:
        log(f"warning: {text}")

    def copies_in(group: Communicator) -> LocalCopies:
        redundancy: Redundancy = NO_REDUNDANCY
        if limits.local_checkpoint_redundancy != NONE:
            redundancy = GroupParity(group, limits.local_checkpoint_redundancy, warn, most_patience_s=most_s)
        return LocalCopies(folder, run_dir, group.rank, limits.local_checkpoint_every, warn, work, redundancy)

    return interval, copies_in, work


def _journal(run_dir: Path, tensorboard: Path | None, on_event: EventHandler | None) -> Journal:
    journal: Journal = FileJournal(run_dir)
    if tensorboard is not None:
        journal = EchoJournal(journal, TensorBoardWriter(tensorboard))
    return EchoJournal(journal, on_event) if on_event is not None else journal


def build_model(config: TrainConfig, dataset: Dataset) -> keras.Model:
    """Build the model of a run for its dataset."""
    inputs, targets = model_shapes(dataset)
    return load_model(
        config.model.model,
        classes=config.model.classes or dataset.num_classes,
        input_shape=inputs,
        loss=",".join(_losses(config, dataset).values()),
        output_shapes=None if dataset.pictures else targets,
        scaled=_comes_scaled(dataset),
    )


def _comes_scaled(dataset: Dataset) -> bool:
    """Whether the model's only input is scaled already, and no function of the user has changed it."""
    if dataset.preprocess is not None or len(dataset.inputs) > 1:
        return False
    if dataset.dtype == "uint8" and dataset.scales(dataset.sample_shape):
        return True
    return any(field.normalise != "none" for field in dataset.inputs)


def _doubts(config: TrainConfig, dataset: Dataset, model: keras.Model, workers: Communicator) -> list[str]:
    spec, weights = config.model.model, config.model.init_weights
    return [
        *difference(model, spec, workers),
        *model_doubts(model, spec, [*_losses(config, dataset).values()]),
        *preprocess_doubts(dataset, config.data, workers),
        *(doubts_of_weights(weights, config, dataset) if weights is not None and workers.rank == 0 else []),
    ]


def _losses(config: TrainConfig, dataset: Dataset) -> dict[str, str]:
    return losses_of(config.objective, [target.name for target in dataset.targets])


def save_model(model: keras.Model, path: Path) -> None:
    """Write `model` so that plain Keras 3 loads it; the file is replaced atomically."""
    with replacing(path) as temporary:
        model.save(temporary)


def _save_finished(model: keras.Model, run_dir: Path) -> list[str]:
    """Write the run's model; if the disk is full, remove older checkpoints first. Return warnings."""
    try:
        save_model(model, run_dir / MODEL_FILE)
        return []
    except (OSError, RuntimeError) as error:  # h5py raises RuntimeError for some disk errors
        first = error
    steps = checkpoints.list_checkpoints(run_dir / checkpoints.FOLDER)
    for step in steps[1:]:  # the newest stays: if this is not enough, the run continues from it
        checkpoints.remove(run_dir / checkpoints.FOLDER, step)
    try:
        save_model(model, run_dir / MODEL_FILE)
    except (OSError, RuntimeError) as error:
        stays = "the newest checkpoint stays" if steps else "there is no checkpoint, its steps are lost"
        raise HpcdlError(
            f"cannot write {run_dir / MODEL_FILE}: {getattr(error, 'strerror', None) or error}; {stays}: make room and "
            "continue with --resume"
        ) from error
    return [f"{MODEL_FILE} found no room ({getattr(first, 'strerror', None) or first}); older checkpoints were removed"]


def _resume(trainer: Trainer, run_dir: Path, communicator: Communicator, warnings: list[str]) -> int | None:
    """Restore the newest complete state into `trainer`. Return its step, or None if nothing was ever saved.

    Raises CorruptError if all saved states are damaged.
    """
    parts = trainer.parts
    kind = kind_for(synchronous=parts.run_plan.info.features.synchronous)
    from_step = parts.config.checkpoint.from_step
    saved = decided(communicator, lambda: step_to_resume(run_dir, from_step, warnings, kind))
    if parts.config.checkpoint.local_checkpoint_redundancy != NONE:
        recover(parts.saver.copies.folder, communicator, saved or 0, parts.saver.copies.log)
    copied = _newest_copied(trainer, communicator, saved or 0, warnings) if from_step is None else None
    # A copy in memory counts only if it is newer than what is saved.
    step = copied or saved
    if step is None:
        decided(communicator, lambda: _refuse_damaged(run_dir, kind))
        return None
    copy = None if copied is None else parts.saver.copies.read_own(copied)

    def take_shared() -> dict[str, Any]:
        copies = parts.saver.copies
        shared, facts = checkpoints.read_shared(run_dir, step) if copied is None else copies.read_shared(copied)
        with _damaged_where(run_dir, step):
            check_facts(facts, kind)
            state.assign(parts.model.weights, shared, "weights")
            state.assign(parts.host.optimizer.variables, shared, "optimizer")
        return facts

    def read_other(rank: int) -> dict[str, Any]:
        if copied is None:
            return checkpoints.read_own(run_dir, step, rank)
        try:
            return parts.saver.copies.read_own(copied, rank)
        except CorruptError as error:  # nothing else of it is needed
            parts.saver.copies.log(f"{error}; what it holds of the epoch's training loss is left out")
            return {}

    # Only rank 0 reads them; `Parts.start` gives its weights to the others.
    facts = decided(communicator, take_shared)
    own_state = checkpoints.read_own(run_dir, step, communicator.rank) if copy is None else copy
    with _damaged_where(run_dir, step):
        _go_on(trainer, communicator, (step, facts, own_state), read_other, warnings)
    parts.saver.copies.resume(step)
    return step


def _go_on(
    trainer: Trainer,
    communicator: Communicator,
    kept: tuple[int, dict[str, Any], dict[str, Any]],
    read_other: Callable[[int], dict[str, Any]],
    warnings: list[str],
) -> None:
    """Restore into `trainer` the facts and this rank's own state, as saved after a step."""
    parts, (step, facts, own_state) = trainer.parts, kept
    same_layout = facts["ranks"] == communicator.size
    # Asynchronous strategies save only worker 0's part: the others begin at the center.
    same_state = same_layout and bool(own_state)
    position = trainer.position_at(step, facts, own_state)
    if not same_layout:
        # Each old rank's sums go to exactly one new rank.
        saved_ranks = range(communicator.rank, facts["ranks"], communicator.size)
        position.totals += sum(read_other(rank).get("totals", 0.0) for rank in saved_ranks)
    if same_state:
        state.assign(state.seed_variables(parts.model), own_state, "seeds")
        parts.restore_worker(own_state)
    elif communicator.rank == 0 and not same_layout:
        warnings.append(
            f"resumed on {counted(communicator.size, 'worker')} what {facts['ranks']} began: a correct run, but not "
            "bit for bit"
        )
    before, now = facts["global_batch"], parts.run_plan.global_batch
    if communicator.rank == 0 and before != now:
        warnings.append(
            f"since step {position.step} a step has {counted(now, 'sample')}, not {before}; "
            f"steps before it were numbered to {step}, so compare epochs"
        )
    history = [from_json(HistoryPoint, point) for point in facts["history"]]
    parts.resume(position, history, facts.get("best_loss"))
    if same_layout and facts.get("buckets"):  # another number of ranks has another best size
        parts.host.buckets = from_json(BucketChoice, facts["buckets"])


@contextlib.contextmanager
def _damaged_where(run_dir: Path, step: int) -> Iterator[None]:
    """Inside, errors from a checkpoint's content become CorruptError with the cause."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        folder = checkpoints.folder_of(run_dir / checkpoints.FOLDER, step)
        cause = f"it has no {error.args[0]}" if isinstance(error, KeyError) and error.args else str(error)
        raise CorruptError(f"checkpoint {folder} is damaged: {cause}") from error


def _refuse_damaged(run_dir: Path, kind: type[Facts]) -> None:
    """Raise CorruptError if there are checkpoints and none is complete, with the defect of the newest."""
    folder = run_dir / checkpoints.FOLDER
    steps = checkpoints.list_checkpoints(folder)
    if not steps:
        return
    cause = "it could not be read"
    try:
        checkpoints.verify(checkpoints.folder_of(folder, steps[0]), kind)
    except CorruptError as error:
        cause = str(error)
    raise CorruptError(f"every checkpoint in {run_dir} is damaged ({cause}); start again in another --run-dir")


def _newest_copied(trainer: Trainer, communicator: Communicator, saved: int, warnings: list[str]) -> int | None:
    """Return the newest step after `saved` that the nodes' memory holds completely, or None; collective.

    Asynchronous strategies keep worker 0's copies alone.
    """
    answers = communicator.allgather_json((trainer.parts.saver.copies.whole(), communicator.host))
    needed = answers if trainer.parts.run_plan.info.features.synchronous else answers[:1]
    step, remark = newest_common(needed, saved)
    warnings += [remark] if remark else []
    return step


def _parameters(model: keras.Model) -> tuple[list[int], int]:
    """Return the elements of each trainable variable, and the bytes of all their gradients."""
    counts = [int(variable.value.shape.num_elements()) for variable in model.trainable_variables]
    return counts, sum(
        count * variable.value.dtype.size for count, variable in zip(counts, model.trainable_variables, strict=True)
    )
