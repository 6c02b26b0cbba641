"""The work of one rank of `hpcdl infer`: `python -m hpcdl.rank.infer OUT`.

Every rank computes whole shards of its own, without communication; rank 0 manages the output folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from hpcdl.cluster.status import FOLDER
from hpcdl.comm.agree import decided
from hpcdl.comm.observed import Observed, RankMonitor, observe
from hpcdl.config.load import flatten
from hpcdl.core.errors import CorruptError, HpcdlError, StoppedEarly
from hpcdl.core.processes.streams import StopRequest
from hpcdl.core.processes.wall import WALL
from hpcdl.core.records.run_record import (
    FILE_NAME,
    InferenceRecord,
    RankRecord,
    RunRecord,
    from_json,
    read_record,
    write_record,
)
from hpcdl.core.statistics import quantiles
from hpcdl.core.storage.files import read_bytes
from hpcdl.core.storage.lock import writing
from hpcdl.core.units import counted
from hpcdl.data.format.dataset import FileOperationsCounter
from hpcdl.data.format.manifest import FILE_NAME as MANIFEST_NAME
from hpcdl.data.read.reader import OpenShard
from hpcdl.data.write.journal import PartialManifest
from hpcdl.data.write.outputs import Done, OutputsPlan, Task, whole_batches
from hpcdl.data.write.shards import ShardResult
from hpcdl.faults.inject import Injection
from hpcdl.node.accelerators import GpuUse
from hpcdl.rank.main import supervised
from hpcdl.rank.results import facts_of_place, now_text, peak_memory_bytes, processors, with_devices
from hpcdl.rank.start import leave
from hpcdl.run.inference import InferencePlan, asked, blank_record, check_same, prepare
from hpcdl.run.journal import EchoJournal, EventHandler, FileJournal, Journal, NullJournal
from hpcdl.supervision import runtime
from hpcdl.supervision.control import check_same_start
from hpcdl.supervision.watchdog import STALL_TIMEOUT_S, Limits, Watchdog
from hpcdl.trace.recorder import recording

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.rank.outputs import Predictor

_REPORT_EVERY_S = 30.0
_MOST_TIMES = 100_000
"""Limit of batch times that all ranks together send; above it each rank sends evenly spaced order statistics."""


@dataclass
class ComputedShare:
    """What one rank computed. `batch_seconds`: from inputs in memory to outputs in memory; `seconds`: everything."""

    results: list[ShardResult] = field(default_factory=list)
    batch_seconds: list[float] = field(default_factory=list)
    num_samples: int = 0
    num_not_finite: int = 0
    seconds: float = 0.0
    gpu_utilisation: float | None = None
    stopped: bool = False

    def as_json(self, most_times: int) -> dict[str, Any]:
        """Return this share as JSON for rank 0, with at most `most_times` batch times."""
        times = sorted(self.batch_seconds)
        if len(times) > most_times:
            # Evenly from the sorted ones, so that the quantiles stay nearly the same.
            times = [times[index] for index in np.linspace(0, len(times) - 1, most_times).astype(int).tolist()]
        lists = {"results": [dataclasses.asdict(result) for result in self.results], "batch_seconds": times}
        numbers = ("num_samples", "num_not_finite", "seconds", "gpu_utilisation", "stopped")
        facts = {
            "num_batches": len(self.batch_seconds),
            "host": os.uname().nodename,
            "memory": peak_memory_bytes(),
            "processors": processors(),
        }
        return {**lists, **{name: getattr(self, name) for name in numbers}, **facts}


def main() -> None:
    """Entry point of a rank that hpcdl starts."""
    stop = StopRequest()
    stop.install()
    out = Path(sys.argv[1])

    def body(communicator: Observed, watch: Watchdog) -> None:
        config, model = asked(out)
        # The next call waits for this lock until rank 0 has ended (`run.inference.written`).
        with writing(out / FOLDER) if communicator.rank == 0 else contextlib.nullcontext():
            infer_rank(prepare(config, model), communicator, out, watch, stop)

    leave(supervised(body, _stall_timeout_s(out)))


def _stall_timeout_s(out: Path) -> float:
    try:
        return asked(out)[0].safety.stall_timeout
    except HpcdlError:  # the error is reported later, when all ranks have started
        return STALL_TIMEOUT_S


def infer_rank(
    plan: InferencePlan,
    communicator: Observed,
    out: Path,
    watch: Watchdog,
    stop: StopRequest,
    on_event: EventHandler | None = None,
) -> None:
    """Compute this rank's shards into `out`; rank 0 writes manifest and record. Collective over all ranks."""
    communicator = observe(communicator)
    monitor = communicator.monitor
    monitor.role = "worker"
    watch.limits = Limits(stall_s=plan.config.safety.stall_timeout, busy_s=plan.config.safety.busy_timeout)
    hosts = communicator.allgather_json(communicator.host)
    watch.hosts = dict(enumerate(hosts))
    software = runtime.software_versions(communicator.library)
    _check_same_start(plan, communicator, software)
    injection = Injection(plan.config.safety.inject, monitor, out)
    communicator = injection.impaired(communicator)
    monitor.doing("importing TensorFlow")
    runtime.import_tensorflow()
    from hpcdl.rank.outputs import Predictor

    precision = plan.trained.model.precision if plan.trained else "float32"
    threads = runtime.configure(deterministic=plan.config.run.deterministic, seed=0, precision=precision)
    with injection, contextlib.closing(_journal(out, communicator.rank, on_event)) as journal:
        monitor.doing("loading the model")
        predictor = Predictor(plan)
        # If the run is still training, two ranks may have read different checkpoints.
        check_same_start({"the model's weights": predictor.digest}, communicator)
        monitor.doing("computing the first batch")
        first_s = max(communicator.allgather_json(predictor.first_batch(asks=communicator.rank == 0)))
        identity = _identity(plan, predictor)
        outputs = _outputs_plan(plan, predictor, identity)
        record = dataclasses.replace(
            blank_record(plan),
            warnings=[*plan.warnings, *predictor.warnings, *injection.log_lines()],
            **facts_of_place(hosts, software, os.environ.get("HPCDL_PROFILE", "")),
            workers=communicator.size,
            global_batch=plan.batch_size * communicator.size,
            intra_op_threads=threads[0],
            inter_op_threads=threads[1],
            inference=InferenceRecord(
                identity=identity,
                splits=[split.name for split in plan.splits],
                outputs=[field.name for field in outputs.fields],
                num_shards=len(outputs.tasks()),
                first_batch_seconds=first_s,
            ),
        )
        record = with_devices(record, communicator, precision)
        whole_shards, complete = _begun(communicator, out, outputs, record, [*plan.notes, *predictor.notes], journal)
        todo = [task for task in outputs.tasks() if task not in whole_shards]
        if todo or not complete:  # an earlier call may have been killed after its last shard
            own_tasks = todo[communicator.rank :: communicator.size]
            share = _computed(predictor, outputs, out, own_tasks, communicator, stop, journal)
            _end(communicator, out, outputs, record, whole_shards, share, injection)
    communicator.barrier()


def _journal(out: Path, rank: int, on_event: EventHandler | None) -> Journal:
    if rank:
        return NullJournal()
    journal: Journal = FileJournal(out)
    return EchoJournal(journal, on_event) if on_event is not None else journal


def _check_same_start(plan: InferencePlan, communicator: Observed, software: Mapping[str, str]) -> None:
    facts = {f"version of {name}": version for name, version in software.items()}
    facts["data manifest"] = plan.dataset.checksum
    facts |= {f"--{key}": str(value) for key, value in flatten(plan.config).items()}
    check_same_start(facts, communicator)


def _identity(plan: InferencePlan, predictor: Predictor) -> dict[str, str]:
    """Return what identifies the outputs: a later call with --resume must have the same values."""
    scale = plan.dataset.scale if plan.trained is None else plan.trained.data.scale
    ways = [
        [field.name, field.normalise, field.statistics] for field in plan.dataset.inputs if not plan.dataset.pictures
    ]
    return {
        "the model": predictor.digest,
        "the data": plan.dataset.checksum,
        "--split": ",".join(split.name for split in plan.splits),
        "--batch-size": str(plan.batch_size),
        "--scale": scale,
        "the statistics": xxhash.xxh3_64_hexdigest(repr(ways).encode()),
        "--preprocess": _function(plan),
        "--shard-samples": str(_shard_samples(plan, predictor)),
        "--deterministic": "true" if plan.config.run.deterministic else "false",
        "--onednn": plan.config.run.onednn,
    }


def _function(plan: InferencePlan) -> str:
    """Return the user's preprocessing function, with a digest of its file if there is one."""
    name = plan.trained.data.preprocess if plan.trained else ""
    path = Path(name.rpartition(":")[0])
    return f"{name} {xxhash.xxh3_64_hexdigest(read_bytes(path))}" if name and path.is_file() else name or "none"


def _shard_samples(plan: InferencePlan, predictor: Predictor) -> int:
    if num_samples := plan.config.run.shard_samples:
        # Whole batches, because a batch is computed for one shard only.
        return -(-num_samples // plan.batch_size) * plan.batch_size
    counts = {split.name: split.num_samples for split in plan.splits}
    return whole_batches(counts, plan.batch_size, sum(field.row_bytes for field in predictor.fields))


def _outputs_plan(plan: InferencePlan, predictor: Predictor, identity: Mapping[str, str]) -> OutputsPlan:
    text = "; ".join(f"{name} {value}" for name, value in identity.items())
    return OutputsPlan(
        name=f"{plan.model_name} on {plan.dataset.name}",
        source_name=plan.dataset.name,
        num_samples={split.name: split.num_samples for split in plan.splits},
        batch_size=plan.batch_size,
        shard_samples=int(identity["--shard-samples"]),
        fields=predictor.fields,
        identity=xxhash.xxh3_64_hexdigest(text.encode()),
        understood=[f"outputs of: {text}"],
    )


def _begun(
    communicator: Observed,
    out: Path,
    outputs: OutputsPlan,
    record: RunRecord,
    notes: Sequence[str],
    journal: Journal,
) -> tuple[Done, bool]:
    """Return the shards that are complete already, and whether a manifest lists them, on every rank.

    Rank 0 checks that they are outputs of the same model and data, and reports what it found.
    """

    def begin() -> tuple[list[dict[str, Any]], bool]:
        assert record.inference is not None
        before = read_record(out) if (out / FILE_NAME).exists() else None
        check_same(out, before.inference if before else None, dict(record.inference.identity))
        whole_shards, damaged = outputs.begin(out)
        if before is None and whole_shards:
            raise CorruptError(f"{out} holds outputs, and no {FILE_NAME} that says of what; name another --out")
        for text in notes:
            journal.write("message", text=text)
        for text in record.warnings:
            journal.write("message", text=f"warning: {text}")
        for text in damaged:
            journal.write("message", text=f"warning: computed again, for it is damaged: {text}")
        _report_shares(outputs, whole_shards, communicator.size, journal)
        complete = (out / MANIFEST_NAME).is_file()
        # If nothing is left to compute, the record of the finished call stays.
        if len(whole_shards) < len(outputs.tasks()) or not complete:
            write_record(out, record)
        return [dataclasses.asdict(result) for result in whole_shards.values()], complete

    communicator.monitor.doing("looking at what is there")
    documents, complete = decided(communicator, begin)
    results = [from_json(ShardResult, document) for document in documents]
    return {(result.split, result.number): result for result in results}, complete


def _report_shares(outputs: OutputsPlan, done: Done, num_ranks: int, journal: Journal) -> None:
    total = len(outputs.tasks())
    num_left = total - len(done)
    if done:
        journal.write("message", text=f"{len(done)} of {counted(total, 'shard')} are there and whole")
    if not num_left:
        journal.write("message", text="nothing is left to compute")
    elif num_left < num_ranks:
        idle = counted(num_ranks - num_left, "rank")
        journal.write(
            "message",
            text=f"warning: {counted(num_left, 'shard')} for {num_ranks} ranks, so {idle} without work; "
            "use fewer --ranks, or in a new --out smaller --shard-samples",
        )


def _computed(
    predictor: Predictor,
    outputs: OutputsPlan,
    out: Path,
    tasks: Sequence[Task],
    communicator: Observed,
    stop: StopRequest,
    journal: Journal,
) -> ComputedShare:
    """Compute this rank's shards and list them. A stop request takes effect after a batch; it drops the open shard."""
    share, monitor = ComputedShare(), communicator.monitor
    steps = BatchSteps(monitor)
    with recording(predictor.plan.config.run.trace, communicator, out):
        with (
            GpuUse(runtime.device_computed_on()) as gpu,
            contextlib.closing(PartialManifest(out, communicator.rank, outputs.identity, "")) as entries,
        ):
            communicator.barrier()
            # Together, because the throughput counts the slowest rank's time for all samples.
            began_s = logged_s = time.perf_counter()
            for task, arrays in _shards(predictor, outputs, tasks, share, stop, steps):
                monitor.doing("writing a shard")
                result = outputs.write(out, task, arrays)
                entries.enter(result)
                share.results.append(result)
                share.num_samples += len(outputs.samples_of(task))
                if time.perf_counter() - logged_s > _REPORT_EVERY_S:
                    logged_s = time.perf_counter()
                    journal.write("message", text=f"rank 0: {len(share.results)} of {counted(len(tasks), 'shard')}")
            steps.end()
            share.seconds = time.perf_counter() - began_s
            share.gpu_utilisation = gpu.mean
        monitor.doing("waiting for the others to end")
        monitor.recorder.quiesced(communicator, last=True)
    return share


class BatchSteps:
    """Reports the batches of a rank as steps, for its trace, its heartbeat and the faults of --inject, counted from 0.

    Nothing is exchanged or updated. The time between a batch's outputs and the next batch, mainly for writing a shard,
    is the step's other time.
    """

    def __init__(self, monitor: RankMonitor) -> None:
        self._monitor, self._number = monitor, 0
        self._borders: list[float] = []

    def begin(self) -> None:
        """Begin a step: the rank waits for its next batch."""
        self.end()
        self._monitor.doing("reading a batch", self._number)
        self._borders = [WALL.now_s()]

    def got_batch(self) -> None:
        """Note that the batch's inputs are in memory."""
        self._borders.append(WALL.now_s())
        self._monitor.doing("computing")

    def computed(self) -> None:
        """Note that the batch's outputs are in memory."""
        self._borders.append(WALL.now_s())

    def end(self) -> None:
        """End the step, if a batch was computed."""
        if len(self._borders) == 3:
            began_s, got_s, computed_s = self._borders
            # Nothing is exchanged or updated: these parts have no length.
            self._monitor.step_over((began_s, got_s, computed_s, computed_s, computed_s, WALL.now_s()))
            self._number += 1
        self._borders = []


def _shards(
    predictor: Predictor,
    outputs: OutputsPlan,
    own_tasks: Sequence[Task],
    share: ComputedShare,
    stop: StopRequest,
    steps: BatchSteps,
) -> Iterator[tuple[Task, dict[str, Any]]]:
    """Yield each task of `own_tasks` with all of its outputs; stop at a stop request."""
    for split in predictor.plan.splits:
        tasks = [task for task in own_tasks if task[0] == split.name]
        firsts = [first for task in tasks for first in outputs.batches_of(task)]
        if not firsts:
            continue
        with contextlib.closing(predictor.batches(split, firsts)) as batches:
            for task in tasks:
                parts: list[dict[str, Any]] = []
                for _ in outputs.batches_of(task):
                    if stop.asked:
                        share.stopped = True
                        return
                    steps.begin()
                    inputs = next(batches)
                    steps.got_batch()
                    began_s = time.perf_counter()
                    arrays = predictor.outputs(inputs)
                    share.batch_seconds.append(time.perf_counter() - began_s)
                    steps.computed()
                    share.num_not_finite += num_not_finite(arrays)
                    parts.append(arrays)
                yield task, {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def num_not_finite(arrays: Mapping[str, Array]) -> int:
    """Return how many samples of a batch have NaN or infinity in an output."""
    bad = [
        ~np.isfinite(array.reshape(len(array), -1)).all(axis=1) for array in arrays.values() if array.dtype.kind == "f"
    ]
    return int(np.any(bad, axis=0).sum()) if bad else 0


def _end(
    communicator: Observed,
    out: Path,
    outputs: OutputsPlan,
    record: RunRecord,
    done: Done,
    share: ComputedShare,
    injection: Injection,
) -> None:
    """Rank 0 writes manifest and record of all ranks' work. Raises StoppedEarly on every rank if one was stopped."""
    most_times = max(1, _MOST_TIMES // communicator.size)
    shares = communicator.allgather_json(share.as_json(most_times))
    if any(part["stopped"] for part in shares):
        raise StoppedEarly("stopped by a signal; whole shards are kept, continue with the same command and --resume")

    def finish() -> bool:
        results = [from_json(ShardResult, document) for part in shares for document in part["results"]]
        outputs.finish(out, {**done, **{(result.split, result.number): result for result in results}})
        over = dataclasses.replace(record, warnings=injection.settled(record.warnings))
        write_record(out, _finished(over, outputs, done, shares, _num_not_finite_kept(out, outputs, done)))
        return True

    decided(communicator, finish)


def _num_not_finite_kept(out: Path, outputs: OutputsPlan, done: Done) -> int:
    """Count the samples with NaN or infinity in the shards of earlier calls: a killed call records no count."""
    count = 0
    for result in done.values():
        assert result.entry is not None
        shard = OpenShard(out / result.entry.file, result.entry, operations=FileOperationsCounter(), verified=False)
        for block in range(shard.map.num_blocks):
            first, stop = shard.map.block_range(block)
            arrays = {field.name: np.empty((stop - first, *field.shape), field.dtype) for field in outputs.fields}
            for name, array in arrays.items():
                shard.read_block(name, block, array)
            count += num_not_finite(arrays)
        shard.close()
    return count


def _finished(
    record: RunRecord, outputs: OutputsPlan, done: Done, shares: Sequence[Mapping[str, Any]], kept_not_finite: int
) -> RunRecord:
    assert record.inference is not None
    times = [seconds for part in shares for seconds in part["batch_seconds"]]
    median, p99 = quantiles(times, [0.5, 0.99]) if times else (None, None)
    computed = sum(part["num_samples"] for part in shares)
    seconds = max(part["seconds"] for part in shares)
    not_finite = kept_not_finite + sum(part["num_not_finite"] for part in shares)
    hosts = [part["host"] for part in shares]
    warnings = [*record.warnings]
    if not_finite:
        warnings.append(f"the outputs of {counted(not_finite, 'sample')} hold NaN or infinity")
    return dataclasses.replace(
        record,
        status="finished",
        finished_at=now_text(),
        steps=sum(part["num_batches"] for part in shares),
        images_per_second=computed / seconds if computed else None,
        seconds_total=seconds,
        warnings=warnings,
        rank_records=[
            RankRecord(
                rank=rank,
                host=hosts[rank],
                peak_memory_bytes=part["memory"],
                processors=part["processors"],
                gpu_utilisation=part["gpu_utilisation"],
                details={"num_samples": part["num_samples"], "seconds": part["seconds"]},
            )
            for rank, part in enumerate(shares)
        ],
        inference=dataclasses.replace(
            record.inference,
            num_computed=computed,
            num_kept=sum(len(outputs.samples_of(task)) for task in done),
            num_not_finite=not_finite,
            batch_seconds_median=median,
            batch_seconds_p99=p99,
        ),
    )


if __name__ == "__main__":
    main()
