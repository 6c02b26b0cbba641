"""Sets TensorFlow up in a rank, before and right after its import."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hpcdl import __version__
from hpcdl.cluster.environment import placement
from hpcdl.cluster.supervise import BINDING_VARIABLE
from hpcdl.core.paths import check_backend
from hpcdl.node import accelerators
from hpcdl.node.binding import apply_planned
from hpcdl.node.engine import is_preloaded
from hpcdl.node.plan import ALLOCATOR, verify_binding

INTRA_OP_VARIABLE = "HPCDL_INTRA_OP_THREADS"
INTER_OP_VARIABLE = "HPCDL_INTER_OP_THREADS"
SET_UP_ANEW = "TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE"
"""By itself (1) TensorFlow has oneDNN set up the gradient of each convolution's kernel anew in each step, from a time
when one that is kept held large buffers. That took 6 % of a small network's step. Where lengths vary, one is kept for
each length, up to a thousand."""


def bind(local_rank: int) -> None:
    """Take the CPUs and the memory that the launch plan has for this rank, before TensorFlow makes its threads."""
    cpus = planned_cpus(local_rank)
    if cpus:
        os.sched_setaffinity(0, cpus)
    apply_planned(local_rank)


def planned_cpus(local_rank: int) -> list[int]:
    """The CPUs that the launch plan has for a rank; empty where it leaves that to others."""
    planned = _cpus_by_local_rank()
    return planned[local_rank] if local_rank < len(planned) else []


def _cpus_by_local_rank() -> list[list[int]]:
    found: list[list[int]] = json.loads(os.environ.get(BINDING_VARIABLE, "[]"))
    return found


def binding_warning() -> str | None:
    """What to say where this rank does not run on the CPUs, or with the allocator, that were planned for it."""
    place = placement()
    allocator = os.environ.get(ALLOCATOR, "default")
    if not is_preloaded(allocator):
        return f"the allocator {allocator} was asked for, but its library was not loaded: the default is in use"
    return verify_binding(planned_cpus(place.local_rank if place else 0))


def claim_device(local_rank: int) -> None:
    """Show this process one accelerator of its node, by its local rank; must come before TensorFlow's import.

    Memory on it grows as needed: TensorFlow would take all of it, also where ranks share a device.
    """
    accelerators.take(accelerators.choose(os.environ, local_rank, _cpus_by_local_rank()))
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


@dataclass(frozen=True, kw_only=True)
class DeviceInUse:
    """What this rank's TensorFlow computes on: the name of a GPU, empty for the CPU.

    `shared` is the device where others of the node that name the same one share it, of `available`.
    """

    name: str = ""
    shared: str = ""
    available: int = 0
    warning: str = ""


def device_in_use() -> DeviceInUse:
    """What TensorFlow computes on; a warning where that is not what this rank has claimed. Nothing where no line has
    imported it.
    """
    if "tensorflow" not in sys.modules:
        return DeviceInUse()
    import tensorflow as tf

    claim = accelerators.claimed()
    found = tf.config.list_physical_devices("GPU")
    if found:
        name = str(tf.config.experimental.get_device_details(found[0]).get("device_name", "GPU"))
        if claim is None or not claim.shared_out:
            return DeviceInUse(name=name)
        return DeviceInUse(name=name, shared=claim.device, available=claim.available)
    if claim is None:
        return DeviceInUse()
    return DeviceInUse(
        warning=f"TensorFlow sees no GPU, though {claim.variable} names {claim.device}: it computes on the CPU; "
        f"see `hpcdl doctor --only gpus`, or set {claim.variable}='' where that is meant"
    )


def device_computed_on() -> accelerators.DeviceClaim | None:
    """The device that this rank has claimed, where TensorFlow computes on it; no claim before its import."""
    return accelerators.claimed() if device_in_use().name else None


def silence() -> None:
    """Keep TensorFlow's chatter out of the user's sight; must come before its import."""
    if not os.environ.get("HPCDL_VERBOSE"):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        sys.meta_path.insert(0, _QuietTensorflow())


class _QuietTensorflow(importlib.abc.MetaPathFinder):
    """Finds TensorFlow as Python does; what its libraries print while a script imports it is dropped.

    They print before a log level counts, so that no variable keeps them quiet.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's place; of every other module none, which leaves it to the finders behind."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == "tensorflow" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def quietly(module: ModuleType) -> None:
                with _silent():
                    execute(module)

            spec.loader.exec_module = quietly  # type: ignore[method-assign]
        return spec


def import_tensorflow(*, fixed_shapes: bool = False) -> None:
    """Import TensorFlow and Keras for the first time; what they print on the way, before any log level counts, is
    dropped.

    `-v` lets them speak. Keras brings matplotlib along where it finds it, for drawings that no rank makes: it does not
    find it here, which together with a collector that rests saves a third of the time. `fixed_shapes`: what is trained
    has the same shapes in every step, so that convolutions are set up once, unless the environment says otherwise.
    """
    check_backend()
    if fixed_shapes:
        os.environ.setdefault(SET_UP_ANEW, "0")
    with _without("matplotlib"), no_collection(), _silent():
        importlib.import_module("tensorflow")
        importlib.import_module("keras")
        gc.freeze()  # what has come by now the collector never looks at again


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Inside, an import of `package` fails as if it were not installed; where it has been imported, nothing changes."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # the import system's own way to say so
    try:
        yield
    finally:
        del sys.modules[package]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Inside, no object is looked at by Python's collector."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside, what the process writes to its stderr is dropped, unless HPCDL_VERBOSE is set."""
    if os.environ.get("HPCDL_VERBOSE"):
        yield
        return
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def configure(*, deterministic: bool, seed: int, precision: str = "float32") -> tuple[int, int]:
    """Set threads, determinism and seeds; returns the intra-op and inter-op thread counts in force.

    Threads come from the launch plan's environment. A deterministic run uses one intra-op thread whatever the plan,
    because sums that are split over threads differ with their number.
    """
    import keras
    import tensorflow as tf

    intra_op = 1 if deterministic else int(os.environ.get(INTRA_OP_VARIABLE, 0))
    inter_op = 2 if deterministic else int(os.environ.get(INTER_OP_VARIABLE, 0))
    tf.config.threading.set_intra_op_parallelism_threads(intra_op)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(precision)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    num_cpus = len(os.sched_getaffinity(0))
    return intra_op or num_cpus, inter_op or num_cpus


def software_versions(mpi_library: str) -> dict[str, str]:
    """Versions of what the numbers depend on, read without importing it."""
    versions = {"hpcdl": __version__, "python": platform.python_version(), "mpi": mpi_library}
    for package in ("tensorflow", "keras", "numpy", "h5py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
