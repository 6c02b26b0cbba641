"""The run's record: built from the data of every rank, written by rank 0."""

from __future__ import annotations

import contextlib
import itertools
import os
import platform
import resource
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hpcdl.config.load import as_toml_values
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.processes.wall import NOTICED_S, WALL
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.run_record import (
    ALL_STEPS_UP_TO,
    ENVIRONMENT_PREFIXES,
    PARTS,
    TIME_FORMAT,
    RankRecord,
    RunRecord,
    from_json,
    read_record,
)
from hpcdl.core.statistics import Sample, mean_of_known
from hpcdl.core.units import counted, format_list, parse_list
from hpcdl.models.table import EMULATED
from hpcdl.node.accelerators import GpuUse
from hpcdl.node.engine import slow_precision
from hpcdl.run.journal import clock_was_set
from hpcdl.run.plan import RunPlan
from hpcdl.step.clock import Outcome
from hpcdl.strategies.base.strategy import StrategyInfo, Worker
from hpcdl.strategies.elastic.server import summary_of
from hpcdl.supervision.runtime import device_in_use

_COMPUTING = "tf_Compute"
"""TensorFlow's name for the threads that run operations."""
_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def first_record(run_plan: RunPlan, hosts: Sequence[str], software: Mapping[str, str], profile: str) -> RunRecord:
    """Return the record at the start of training; `hosts` are the ranks' hosts in rank order."""
    return RunRecord(
        **facts_of_place(hosts, software, profile),
        strategy=run_plan.info.name,
        model=run_plan.config.model.model,
        data=run_plan.dataset.name,
        num_samples=run_plan.dataset.train_split.num_samples,
        counted=run_plan.dataset.counted,
        data_checksum=run_plan.dataset.checksum,
        evaluated_on=split.name if (split := run_plan.dataset.evaluation_split) else "",
        workers=run_plan.num_workers,
        servers=run_plan.num_servers,
        # An uneven batch gives the last worker, and its last slice, most samples.
        batch_per_rank=run_plan.slices_of(run_plan.num_workers - 1)[-1],
        accumulate=len(run_plan.slices_of(run_plan.num_workers - 1)),
        global_batch=run_plan.global_batch,
        target_accuracy=run_plan.config.objective.target_accuracy,
        warmup_steps=run_plan.config.run.warmup_steps,
        config=as_toml_values(run_plan.config),
    )


def facts_of_place(hosts: Sequence[str], software: Mapping[str, str], profile: str) -> dict[str, Any]:
    """Return the record's fields for time and place; `hosts` are the ranks' hosts in rank order."""
    nodes = list(dict.fromkeys(hosts))
    return {
        "started_at": now_text(),
        "ranks": len(hosts),
        "nodes": len(nodes),
        "ranks_per_node": max(hosts.count(node) for node in nodes),
        "hosts": nodes,
        "machine": os.environ.get("HPCDL_MACHINE", platform.node()),
        "processor": _processor(),
        "cores_per_node": os.cpu_count(),
        "profile": profile,
        "software": software,
        "environment": allowed_environment(os.environ),
    }


def refuse_shared_devices(info: StrategyInfo, workers: Communicator) -> None:
    """Raise UsageError if ranks share a GPU and the strategy needs one per rank; collective over the workers."""
    if info.features.own_device:
        devices = workers.allgather_json([workers.host, asdict(device_in_use())])
        for line in _sharing(devices):
            raise UsageError(f"--strategy {info.name}: {line}, or use --strategy ring")


def _sharing(devices: Sequence[Any]) -> list[str]:
    """Return a line for each GPU that several ranks share; `devices` has hosts and devices in use, in rank order."""
    by_device: dict[tuple[str, str], list[int]] = {}
    for rank, (host, device_info) in enumerate(devices):
        if device_info["shared"]:
            by_device.setdefault((host, device_info["shared"]), []).append(rank)
    return [
        f"ranks {', '.join(map(str, ranks))} share GPU {device} of {host}, "
        f"which has {devices[ranks[0]][1]['available']}: start as many workers a node as it has GPUs"
        for (host, device), ranks in by_device.items()
        if len(ranks) > 1
    ]


def with_devices(record: RunRecord, workers: Communicator, precision: str = "") -> RunRecord:
    """Return `record` with the devices in use, and warnings for unusual or slow ones; collective over the workers."""
    devices = workers.allgather_json([workers.host, asdict(device_in_use())])
    warnings = [f"rank {rank}: {device['warning']}" for rank, (_, device) in enumerate(devices) if device["warning"]]
    warnings += _sharing(devices)
    names = [device["name"] for _, device in devices]
    accelerators = dict(Counter(name for name in names if name))
    if accelerators and "" in names:
        warnings.append(f"{names.count('')} of {len(names)} workers compute on CPUs, the others on GPUs")
    if "" in names and (slow := slow_precision(precision)):
        warnings.append(slow)
    return replace(record, accelerators=accelerators, warnings=[*record.warnings, *warnings])


def continued_record(record: RunRecord, run_dir: Path, step: int) -> RunRecord:
    """Return `record` of a run that resumes after `step`, with what the record of its first part holds."""
    try:
        before = read_record(run_dir)
    except CorruptError:  # killed before its first record, or damaged: the checkpoint is what counts
        return replace(record, resumed_from_steps=[step])
    return replace(
        record,
        started_at=before.started_at,
        resumed_from_steps=[*before.resumed_from_steps, step],
        warnings=before.warnings,
    )


def begun_again(run_dir: Path) -> list[str]:
    """Return a warning if an earlier start of a run got as far as its first step, and saved nothing."""
    try:
        read_record(run_dir)
    except CorruptError:
        return []
    return ["began again from the start: times and node-hours leave out what its earlier starts took"]


def finished_record(
    record: RunRecord,
    run_plan: RunPlan,
    outcome: Outcome,
    ranks: Sequence[RankRecord],
    parameters: tuple[Sequence[int], int],
) -> RunRecord:
    """Return `record` with the run's results; `parameters`: elements of each trainable variable, bytes of all."""
    clock = outcome.clock
    warnings = []
    if clock.num_steps and not clock.is_warm:
        warnings.append(f"only {counted(clock.num_steps, 'step')}: throughput includes the warm-up")
    workers = [rank for rank in ranks if rank.role == "worker"]
    last = outcome.history[-1] if outcome.history else None
    throughput = _throughput(workers, run_plan)
    counts = [rank.details["staleness_counts"] for rank in ranks if "staleness_counts" in rank.details]
    staleness_mean, staleness_max, staleness_histogram = summary_of(counts)
    return replace(
        record,
        status="finished",
        finished_at=now_text(),
        parameters=sum(parameters[0]),
        gradient_bytes=parameters[1],
        gradient_elements=tuple(parameters[0]),
        steps=outcome.center_steps or max(outcome.steps_done, last.step if last else 0),
        **facts_of_steps(clock.num_steps, clock.first_steps.tolist(), clock.steps),
        images_per_second=throughput,
        seconds_per_epoch=run_plan.global_batch * run_plan.steps_per_epoch / throughput if throughput else None,
        seconds_total=outcome.seconds,
        parts={part: statistics.fmean(rank.parts.get(part, 0.0) for rank in workers) for part in PARTS},
        imbalance_seconds=_imbalance(workers),
        bytes_sent_per_step=mean_of_known([rank.bytes_sent_per_step for rank in workers]),
        bytes_received_per_step=mean_of_known([rank.bytes_received_per_step for rank in workers]),
        loss=(last.val_loss if last.val_loss is not None else last.loss) if last else None,
        accuracy=(last.val_accuracy if last.val_accuracy is not None else last.accuracy) if last else None,
        staleness_mean=staleness_mean,
        staleness_max=staleness_max,
        staleness_histogram=staleness_histogram,
        history=outcome.history,
        rank_records=ranks,
        seconds_to_target=outcome.seconds_to_target,
        checkpoint_interval=outcome.checkpoint_interval,
        bucket_bytes=outcome.bucket_bytes,
        bucket_seconds=outcome.bucket_seconds,
        period=workers[0].details.get("period", {}).get("steps"),
        background=summed([rank.background for rank in workers]),
        warnings=[
            *record.warnings,
            *outcome.warnings,
            *warnings,
            *warnings_of_nodes(record, ranks),
        ],
    )


def facts_of_steps(num_steps: int, first_steps: Sequence[float], steps: Sample) -> dict[str, Any]:
    """Return the record's fields for step times: each time up to ALL_STEPS_UP_TO, and quantiles of `steps`."""
    quantiles = steps.quantiles(_QUANTILES) if num_steps else ()
    return {
        "step_seconds": first_steps if num_steps <= ALL_STEPS_UP_TO else (),
        "step_seconds_quantiles": dict(zip((f"{100 * p:g}%" for p in _QUANTILES), quantiles, strict=False)),
    }


def gather_ranks(communicator: Communicator, record: RankRecord) -> list[RankRecord]:
    """Return every rank's own record, on every rank."""
    return [from_json(RankRecord, document) for document in communicator.allgather_json(vars(record))]


def worker_record(
    communicator: Communicator, outcome: Outcome, worker: Worker, run_plan: RunPlan, gpu: GpuUse
) -> RankRecord:
    """Return this worker's part of the record; the traffic of TensorFlow's own engines cannot be counted."""
    countable = run_plan.info.features.mpi or run_plan.num_workers == 1
    return RankRecord(
        rank=communicator.rank,
        host=communicator.host,
        parts=outcome.clock.mean_parts(),
        **outcome.traffic.per_step(outcome.steps_done, countable=countable),
        peak_memory_bytes=peak_memory_bytes(),
        background=outcome.background,
        clock_set_s=clock_set_s(),
        processors=processors(),
        gpu_utilisation=gpu.mean,
        details=worker.details(),
    )


def summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the sum of each number over the mappings that have it."""
    return {name: sum(part.get(name, 0.0) for part in parts) for name in dict.fromkeys(itertools.chain(*parts))}


def allowed_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a record may hold."""
    return {name: environment[name] for name in sorted(environment) if name.startswith(ENVIRONMENT_PREFIXES)}


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process."""
    # Linux counts it in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def processors(threads: Path = Path("/proc/self/task")) -> str:
    """Return the CPUs of TensorFlow's computing threads as a kernel CPU list; without such threads, the process's."""
    cpus: set[int] = set()
    for thread in threads.iterdir():
        with contextlib.suppress(OSError):  # a thread may end at any time
            if (thread / "comm").read_text(encoding="ascii", errors="replace").strip() == _COMPUTING:
                cpus |= os.sched_getaffinity(int(thread.name))
    return format_list(cpus or os.sched_getaffinity(0))


def now_text() -> str:
    """Return the local time with its UTC offset, to the second (ISO 8601)."""
    return time.strftime(TIME_FORMAT, time.localtime(WALL.now_s()))


def clock_set_s() -> float:
    """Return by how many seconds this host's clock was set during this process; 0 if the shift may be noise."""
    set_by_s = WALL.set_by_s()
    return round(set_by_s, 3) if abs(set_by_s) > NOTICED_S else 0.0


def warnings_of_nodes(record: RunRecord, ranks: Sequence[RankRecord]) -> list[str]:
    """Return a line for each host whose clock was set, and one if workers that compute had to share processors."""
    by_host = {rank.host: rank.clock_set_s for rank in ranks if rank.clock_set_s}
    lines = [clock_was_set(host, seconds) for host, seconds in by_host.items()]
    # Where GPUs compute, the threads wait.
    threads = 1 if record.accelerators else record.intra_op_threads or 1
    return lines if record.model.startswith(EMULATED) else [*_crowded(ranks, threads), *lines]


def _crowded(ranks: Sequence[RankRecord], threads: int) -> Iterable[str]:
    workers: dict[str, list[tuple[int, ...]]] = {}
    for rank in ranks:
        if rank.role == "worker":
            workers.setdefault(rank.host, []).append(parse_list(rank.processors))
    counts = {host: (len(lists), len(set(itertools.chain(*lists)))) for host, lists in workers.items()}
    # One worker with too many threads slows itself alone; several look like bad scaling.
    crowded = {
        host: (count, cpus) for host, (count, cpus) in counts.items() if count > 1 and count * threads > cpus > 0
    }
    if crowded:
        host, (count, cpus) = next(iter(crowded.items()))
        others = f" (likewise on {counted(len(crowded) - 1, 'other node')})" if len(crowded) > 1 else ""
        yield (
            f"{count} workers{'' if count > cpus else f' with {threads} threads each'} share "
            f"{counted(cpus, 'processor')} of {host}{others}: they slow each other down, so "
            "these times show no scaling"
        )


def _throughput(workers: Sequence[RankRecord], run_plan: RunPlan) -> float | None:
    """Return the samples per second of all workers: the sum of batch over mean step time (docs/metrics.md).

    Only steps count: evaluation, checkpoints and the shutdown are excluded for every strategy.
    """
    steps_s = [(run_plan.samples_of(rank.rank), sum(rank.parts.values())) for rank in workers]
    return sum(samples / seconds for samples, seconds in steps_s if seconds > 0) or None


def _imbalance(workers: Sequence[RankRecord]) -> float | None:
    compute = [rank.parts.get("compute", 0.0) for rank in workers]
    return max(compute) - statistics.fmean(compute) if compute else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines: list[Any] = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
