"""Sets TensorFlow up in a rank, before and right after its import."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import os
import platform
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from hpcdl import __version__
from hpcdl.cluster.environment import placement
from hpcdl.cluster.supervise import BINDING_VARIABLE
from hpcdl.core.paths import check_backend
from hpcdl.core.processes.collector import no_collection
from hpcdl.node import accelerators
from hpcdl.node.binding import apply_planned
from hpcdl.node.engine import is_preloaded
from hpcdl.node.plan import ALLOCATOR, verify_binding

INTRA_OP_VARIABLE = "HPCDL_INTRA_OP_THREADS"
INTER_OP_VARIABLE = "HPCDL_INTER_OP_THREADS"
SET_UP_ANEW = "TF_MKL_OPTIMIZE_PRIMITIVE_MEMUSE"
"""The variable that makes TensorFlow set up the gradient of each convolution kernel again in each step; 1 by default.

It concerns oneDNN. The default is from a time when a cached setup held large buffers. It took 6 % of a small network's
step. With variable lengths, one setup per length is cached, up to a thousand.
"""


def bind(local_rank: int) -> None:
    """Bind to the CPUs and memory that the launch plan assigns to this rank, before TensorFlow creates its threads."""
    cpus = planned_cpus(local_rank)
    if cpus:
        os.sched_setaffinity(0, cpus)  # of this thread: those made later inherit it
    apply_planned(local_rank)


def planned_cpus(local_rank: int) -> list[int]:
    """Return the CPUs that the launch plan assigns to a rank; empty if it leaves the binding to others."""
    planned = _cpus_by_local_rank()
    return planned[local_rank] if local_rank < len(planned) else []


def _cpus_by_local_rank() -> list[list[int]]:
    cpus: list[list[int]] = json.loads(os.environ.get(BINDING_VARIABLE, "[]"))
    return cpus


def binding_warning() -> str | None:
    """Return a warning if this rank does not have the planned CPUs or allocator."""
    rank_place = placement()
    allocator = os.environ.get(ALLOCATOR, "default")
    if not is_preloaded(allocator):
        return f"the allocator {allocator} was asked for, but its library was not loaded: the default is in use"
    return verify_binding(planned_cpus(rank_place.local_rank if rank_place else 0))


def claim_device(local_rank: int) -> None:
    """Restrict this process to one accelerator of its node, by its local rank; must precede TensorFlow's import.

    Its memory is allocated as needed: TensorFlow would take all of it, even if ranks share a device.
    """
    accelerators.take(accelerators.choose(os.environ, local_rank, _cpus_by_local_rank()))
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")


@dataclass(frozen=True, kw_only=True)
class DeviceInUse:
    """The device of this rank's TensorFlow: the name of a GPU, empty for the CPU.

    `shared` is the device if other ranks of the node may use the same one, out of `available`.
    """

    name: str = ""
    shared: str = ""
    available: int = 0
    warning: str = ""


def device_in_use() -> DeviceInUse:
    """Return the device that TensorFlow computes on, with a warning if it differs from the claimed one.

    Empty if TensorFlow is not imported.
    """
    if "tensorflow" not in sys.modules:
        return DeviceInUse()
    import tensorflow as tf

    claim = accelerators.claimed()
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        name = str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU"))
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
    """Return the device that this rank has claimed if TensorFlow computes on it; None before its import."""
    return accelerators.claimed() if device_in_use().name else None


def silence() -> None:
    """Suppress TensorFlow's log output for the user, and make its import faster; must precede the import."""
    if not os.environ.get("HPCDL_VERBOSE"):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if not any(isinstance(finder, _QuickImports) for finder in sys.meta_path):
        sys.meta_path.insert(0, _QuickImports())  # first, or Python's own finder loads it as usual


class _QuickImports(importlib.abc.MetaPathFinder):
    """Finds TensorFlow and Keras as Python does, and saves a quarter of the time that their import takes.

    It pauses the garbage collector, compiles repeated annotations once, and leaves matplotlib for the first plot. What
    TensorFlow's libraries print meanwhile is dropped: no log level takes effect before, so no variable hides it.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that is imported in another way; None leaves a module to the next finders."""
        if name not in ("tensorflow", "keras", *_PLOTS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module  # each import has its own loader: no other module's is changed

            def quickly(module: ModuleType) -> None:
                first = name == "tensorflow" or "tensorflow" not in sys.modules
                with contextlib.ExitStack() as stack:
                    if name == "tensorflow":
                        stack.enter_context(_annotations_compiled_once())
                        stack.enter_context(_silent())
                    stack.enter_context(_without("matplotlib") if name in _PLOTS else no_collection())
                    execute(module)
                if name in _PLOTS:
                    _import_later(module, *_PLOTS[name])
                elif first:  # later it could hide variables from gc.get_objects (scripts/existing.py)
                    # The collector never examines the objects created so far. What a script drops later of its own is
                    # freed by its reference count, but for cycles.
                    gc.freeze()

            spec.loader.exec_module = quickly  # type: ignore[method-assign]
        return spec


_PLOTS = {
    "keras.src.visualization.plot_image_gallery": ("plt", "matplotlib.pyplot"),
    "keras.src.visualization.plot_bounding_box_gallery": ("patches", "matplotlib.patches"),
}
"""Keras's modules that draw: the name in each of a module of matplotlib, which takes half a second to import."""


class _Later(ModuleType):
    """Stands for a module that is imported when it is first used."""

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self.__name__), name)


def _import_later(module: ModuleType, name: str, wanted: str) -> None:
    """Let `name` stand for the module `wanted`, if it is installed and `module` has not imported it."""
    if vars(module).get(name, module) is None and importlib.machinery.PathFinder.find_spec(wanted.partition(".")[0]):
        setattr(module, name, _Later(wanted))


def import_tensorflow(*, fixed_shapes: bool = False) -> None:
    """Import TensorFlow and Keras, fast and without what they print before any log level takes effect; `-v` shows it.

    `fixed_shapes`: training has the same shapes in every step, so convolutions are set up once, unless the environment
    says otherwise.
    """
    check_backend()
    if fixed_shapes:
        os.environ.setdefault(SET_UP_ANEW, "0")
    silence()
    importlib.import_module("keras")


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Inside, an import of `package` fails as if it were not installed; no effect if it is already imported."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # how the import system marks a missing module
    try:
        yield
    finally:
        del sys.modules[package]


@contextlib.contextmanager
def _annotations_compiled_once() -> Iterator[None]:
    """Inside, `typing` compiles equal texts of annotations once.

    TensorFlow's modules hold 18,000 annotations as text, of which 115 differ. `typing` finds this name before Python's
    own `compile`; where it compiles no annotations (Python 3.14), this has no effect.
    """
    vars(typing)["compile"] = functools.cache(compile)
    try:
        yield
    finally:
        vars(typing).pop("compile", None)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Inside, what the process writes to its stderr is dropped, unless HPCDL_VERBOSE is set."""
    if os.environ.get("HPCDL_VERBOSE"):
        yield
        return
    # The descriptor, because libraries in C++ do not write through sys.stderr.
    stderr_copy = os.dup(2)
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


def configure(*, deterministic: bool, seed: int, precision: str = "float32") -> tuple[int, int]:
    """Set threads, determinism and seeds; returns the intra-op and inter-op thread counts in force.

    Threads come from the launch plan's environment. A deterministic run uses one intra-op thread whatever the plan,
    because sums that are split over threads differ with their number.
    """
    import keras
    import tensorflow as tf

    intra_op = 1 if deterministic else int(os.environ.get(INTRA_OP_VARIABLE, 0))
    # Two: one operation may wait for the exchange while another computes.
    inter_op = 2 if deterministic else int(os.environ.get(INTER_OP_VARIABLE, 0))
    tf.config.threading.set_intra_op_parallelism_threads(intra_op)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(precision)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
    num_cpus = len(os.sched_getaffinity(0))
    # With 0 TensorFlow takes one thread for each CPU of the affinity mask.
    return intra_op or num_cpus, inter_op or num_cpus


def software_versions(mpi_library: str) -> dict[str, str]:
    """Return the versions of the packages that affect results, without importing them."""
    versions = {"hpcdl": __version__, "python": platform.python_version(), "mpi": mpi_library}
    for package in ("tensorflow", "keras", "numpy", "h5py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
