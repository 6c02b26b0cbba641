"""The record of one run: what `train` writes and `report` reads (`hpcdl.run/1`, docs/run-record.md).

Frozen dataclasses on one side, JSON on the other. /1 only grows: readers ignore fields that they do not know, and
fields that an older writer omitted take their defaults.
`python -m hpcdl.core.records.run_record > share/hpcdl/schemas/run-1.json` writes the schema that is installed.

The state of a run combines the status in its record with a check whether a process still writes to its folder.
A record cannot say that its run was lost with all of its processes. The locks can: the process that started the run
holds one, rank 0 another, and the kernel releases them however a process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hpcdl.core.errors import CorruptError
from hpcdl.core.processes.wall import WALL
from hpcdl.core.records.from_json import check_fields, read_as, read_with, schema_of
from hpcdl.core.records.from_json import from_json as from_json
from hpcdl.core.storage.files import parse_json, without_infinities, write_json
from hpcdl.core.storage.lock import FILE_NAME as LOCK_NAME
from hpcdl.core.units import IMAGES

RANKS = "ranks"
"""The folder in a run directory with the status files of its ranks."""
STARTING, RUNNING, FINISHED, STOPPED, FAILED, LOST = "starting", "running", "finished", "stopped", "failed", "lost"
NOT_MEASURED = (STARTING, RUNNING, STOPPED, FAILED, LOST)
"""States of a run whose numbers are not a measurement."""
SILENT_S = 3600.0
"""A run on another host, whose locks cannot be checked from here, counts as lost after this time without output."""
_SLACK_S = 2.0
_HELD, _FREE = "held", "free"
_JOURNAL = "metrics.jsonl"


def state_of(run_dir: Path, status: str | None = None) -> str:
    """Return the state of the run in `run_dir`, whose record has `status`; None reads the record. Writes nothing.

    It is the record's status, with two exceptions. A running run whose processes are gone is `lost`. A run that is
    being resumed, or has no record yet, is `starting`. If that cannot be known from here: `running (not verified: on
    HOST)`.
    """
    if status is None:
        status = _recorded(run_dir)
    if status not in NOT_MEASURED:
        return status
    states = [_look_at(run_dir / LOCK_NAME), _look_at(run_dir / RANKS / LOCK_NAME)]
    if _HELD in states:
        return RUNNING if status == RUNNING else STARTING
    if status not in (STARTING, RUNNING):
        return status
    unsure = next((word for word in states if word != _FREE), None)
    if unsure is None or _silent_s(run_dir) > SILENT_S:
        return LOST
    return f"{status} (not verified: {unsure})"


def is_measured(state: str) -> bool:
    """Return whether numbers of a run in this state are a measurement."""
    return state.partition(" (")[0] not in NOT_MEASURED


def continues(state: str) -> bool:
    """Return whether a run in this state may still produce output, as far as can be known."""
    return state.partition(" (")[0] in (STARTING, RUNNING)


def _recorded(run_dir: Path) -> str:
    with contextlib.suppress(CorruptError):
        return recorded_status(run_dir)
    return STARTING


def _look_at(path: Path) -> str:
    """Return whether a process holds this lock: _HELD, _FREE, or the reason why that cannot be known from here."""
    try:
        # O_NONBLOCK: someone may have put a pipe there, and opening it would wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError:
        return f"{path} cannot be read"
    except OSError:  # absent, as a writer leaves it; or not made by hpcdl
        return _FREE
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            return _FREE
        holder = _holder(descriptor)
        host = str(holder.get("host") or socket.gethostname())
        try:
            # Shared: the file is open for reading only, and two commands may look at the same time.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return _HELD
            if host == socket.gethostname():  # a file system without flock
                return _HELD if _lives(holder.get("pid"), facts.st_mtime) else _FREE
        return _FREE if host == socket.gethostname() else f"on {host}"  # some file systems lock for each host alone
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError, OSError):
        document = parse_json(os.pread(descriptor, 4096, 0))
        return document if isinstance(document, dict) else {}
    return {}


def _lives(pid: object, since: float) -> bool:
    """Return whether this process of this host existed at the Unix time `since`: numbers are reused."""
    try:
        # Field 22 of the file, counted from behind the name: the start in clock ticks since the boot.
        ticks = float(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        age_s = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return False
    return age_s + _SLACK_S >= WALL.now_s() - since


def _silent_s(run_dir: Path) -> float:
    """Return the seconds since the run last wrote a file that shows progress."""
    times = []
    for path in (run_dir / _JOURNAL, run_dir / FILE_NAME, run_dir / RANKS):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return WALL.now_s() - max(times, default=0.0)


SCHEMA = "hpcdl.run/1"
FILE_NAME = "record.json"
PARTS = ("input", "compute", "wait", "exposed_communication", "update", "other")
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
"""The format of `started_at` and `finished_at`, for strftime and strptime."""
ALL_STEPS_UP_TO = 10_000
"""Step times are stored individually up to this many steps, as quantiles beyond."""
ENVIRONMENT_PREFIXES = (
    "OMP_", "KMP_", "MKL_NUM_", "TF_ENABLE_ONEDNN", "TF_NUM_", "TF_XLA_FLAGS", "GLIBC_TUNABLES", "ONEDNN_", "DNNL_",
    "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "PBS_JOBID", "LSB_JOBID",
    "FLUX_JOB_ID", "OMPI_MCA_", "MPICH_", "MPIR_CVAR_", "UCX_", "HPCDL_INTRA_OP_THREADS", "HPCDL_INTER_OP_THREADS",
    "HPCDL_MEMORY_POLICY", "HPCDL_VERSION", "HPCDL_ALLOCATOR", "CUDA_VISIBLE_DEVICES", "CXI_", "FI_", "NCCL_",
)  # fmt: skip
"""The only environment variables that a record may hold; none of them carries a secret."""


@dataclass(frozen=True, kw_only=True)
class HistoryPoint:
    """A point of the training: `seconds` since the first step began; loss and accuracy are means over the samples."""

    epoch: float
    step: int
    seconds: float
    loss: float | None = None
    accuracy: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_metrics: Mapping[str, float] = field(default_factory=dict)


def history_point(*, val_metrics: Mapping[str, float] = MappingProxyType({}), **values: Any) -> HistoryPoint:
    """Return a point of measured values; a number that is not finite counts as not measured, since JSON lacks it."""
    metrics = {name: value for name, value in val_metrics.items() if math.isfinite(value)}
    return HistoryPoint(**without_infinities(values), val_metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank: `parts` are mean seconds per step after warm-up, by the names in PARTS.

    `bytes_*` are of the exchange, as comm/observed counted them; None if they cannot be counted (transfers inside MPI
    or TensorFlow). `rounds_per_step` counts messages that followed one another, `round_bytes_per_step` their bytes.
    `busy_seconds_per_step` is the working time of a server. `background` holds `in_gaps_s` and `outside_s`: processor
    time of background work while the rank waited for others, and outside its steps. `clock_set_s` is the time by which
    the system clock was set ahead (back: negative) during the run, which changed none of these numbers.
    `processors` are those on which its computing threads might run at its end, as a kernel list: `0-3,8`.
    `gpu_utilisation` is the share of the training, 0 to 1, in which its GPU computed, for any process.
    """

    rank: int
    host: str
    role: str = "worker"
    parts: Mapping[str, float] = field(default_factory=dict)
    bytes_sent_per_step: float | None = None
    bytes_received_per_step: float | None = None
    rounds_per_step: float | None = None
    round_bytes_per_step: float | None = None
    busy_seconds_per_step: float | None = None
    peak_memory_bytes: int | None = None
    background: Mapping[str, float] = field(default_factory=dict)
    clock_set_s: float = 0.0
    processors: str = ""
    gpu_utilisation: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class InferenceRecord:
    """The results of `hpcdl infer`. Times in seconds, sizes in samples; None means not measured (yet).

    `identity` describes the source of the outputs: a resumed call must find the same. `num_computed` samples are of
    this call, whose rate the record holds; `num_kept` existed before; of both, `num_not_finite` have NaN or infinity.
    `batch_seconds_*` are times of a batch on one rank, from inputs in memory to outputs in memory, over all ranks,
    without the first batch. That one, with the compilation, is `first_batch_seconds`, of the slowest rank.
    """

    identity: Mapping[str, str] = field(default_factory=dict)
    splits: Sequence[str] = ()
    outputs: Sequence[str] = ()
    num_shards: int = 0
    num_computed: int = 0
    num_kept: int = 0
    num_not_finite: int = 0
    batch_seconds_median: float | None = None
    batch_seconds_p99: float | None = None
    first_batch_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run. Times in seconds, sizes in bytes; None means not measured (yet).

    `failure` is the kind of error that ended it, if that has one (core/errors.py).
    `gradient_elements` are those of each trainable variable, in the order of their creation. `evaluated_on` is the
    split of the held-out loss and accuracy, empty if there was none, as in records of earlier versions.
    `fast_kernels` are the operations that a kernel other than Keras's own computed (step/kernels); until the run ends
    also those that only the user's own layers may call.
    `accelerators` counts the workers that computed on a GPU, by its name; empty if all computed on CPUs.
    `counted` says what `images_per_second` counts: IMAGES, as in the field's name, or SAMPLES (core/units.py).
    `inference` holds the results of `hpcdl infer`, None for every other run.
    `staleness_*` count updates of the center between a worker's read and its write. `study`, `mode` (`weak`, `strong`
    or `scale-up`), `repeat` and `labels` (a setting's name in reports, or a `key=value`) are set by the run's study.
    """

    schema: str = SCHEMA
    status: str = "running"
    message: str = ""
    failure: str = ""
    started_at: str = ""
    finished_at: str = ""
    strategy: str
    model: str
    parameters: int | None = None
    gradient_bytes: int | None = None
    gradient_elements: Sequence[int] = ()
    data: str
    num_samples: int | None = None
    counted: str = IMAGES
    data_checksum: str = ""
    evaluated_on: str = ""
    ranks: int
    workers: int
    servers: int = 0
    nodes: int = 1
    ranks_per_node: int = 1
    hosts: Sequence[str] = ()
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None
    fast_kernels: Sequence[str] = ()
    accelerators: Mapping[str, int] = field(default_factory=dict)
    batch_per_rank: int | None
    accumulate: int = 1
    global_batch: int | None
    steps: int = 0
    warmup_steps: int = 0
    step_seconds: Sequence[float] = ()
    step_seconds_quantiles: Mapping[str, float] = field(default_factory=dict)
    images_per_second: float | None = None
    seconds_per_epoch: float | None = None
    seconds_total: float | None = None
    target_accuracy: float | None = None
    seconds_to_target: float | None = None
    resumed_from_steps: Sequence[int] = ()
    checkpoint_interval: Mapping[str, float] = field(default_factory=dict)
    background: Mapping[str, float] = field(default_factory=dict)
    bucket_bytes: int | None = None
    bucket_seconds: Mapping[str, float] = field(default_factory=dict)
    period: int | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    imbalance_seconds: float | None = None
    bytes_sent_per_step: float | None = None
    bytes_received_per_step: float | None = None
    link_bytes_per_second: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    staleness_histogram: Mapping[str, int] = field(default_factory=dict)
    loss: float | None = None
    accuracy: float | None = None
    history: Sequence[HistoryPoint] = ()
    rank_records: Sequence[RankRecord] = ()
    inference: InferenceRecord | None = None
    machine: str = ""
    processor: str = ""
    cores_per_node: int | None = None
    profile: str = ""
    software: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    study: str = ""
    mode: str = ""
    repeat: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class JournalEvent:
    """The fields of a journal's events that hpcdl reads again, for every kind; other fields are for people."""

    kind: str = ""
    at: float | None = None
    step: int | None = None
    steps: int | None = None
    done: int | None = None
    epoch: float | None = None
    seconds: float | None = None
    loss: float | None = None
    accuracy: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_metrics: Mapping[str, float] = field(default_factory=dict)
    images_per_second: float | None = None
    counted: str = IMAGES
    job: str = ""
    text: str = ""


def event_of(line: bytes) -> dict[str, Any]:
    """Return the event in a line of a journal. Raises ValueError if it is none, or has text in place of a number."""
    event = parse_json(line)
    if not isinstance(event, dict):
        raise ValueError("it is not an object")
    check_fields(JournalEvent, event)
    odd = next((key for key, value in event.items() if isinstance(value, float) and not math.isfinite(value)), None)
    if odd is not None:
        raise ValueError(f"{odd} is {event[odd]}, no finite number")
    return event


def write_record(run_dir: Path, record: RunRecord) -> None:
    """Write `record` into `run_dir`, atomically."""
    write_json(run_dir / FILE_NAME, dataclasses.asdict(record))


def read_record(run_dir: Path) -> RunRecord:
    """Return the record in `run_dir`. Raises CorruptError if it is missing, not JSON, or of another schema or types."""
    with _named(run_dir):
        return read_as(RunRecord, f"{run_dir}{os.sep}{FILE_NAME}", SCHEMA)


def recorded_status(run_dir: Path) -> str:
    """Return the status in the record in `run_dir`, whatever its other fields. Raises CorruptError if there is none."""
    with _named(run_dir):
        path = f"{run_dir}{os.sep}{FILE_NAME}"
        return read_with(lambda document: str(document.get("status", "running")), path, SCHEMA)


@contextmanager
def _named(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise CorruptError(f"{run_dir} holds no {FILE_NAME}; name a folder that `hpcdl train` made") from None


def record_schema() -> dict[str, Any]:
    """Return the JSON Schema of record.json, generated from the dataclass, so that the two agree. /1 only grows."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema = {"$schema": dialect, **schema_of(RunRecord), "title": f"A run of hpcdl ({SCHEMA})"}
    schema["properties"]["schema"] = {"const": SCHEMA}
    schema["required"] = ["schema", *schema["required"]]
    return schema


if __name__ == "__main__":
    print(json.dumps(record_schema(), indent=1))
