"""Sets TensorFlow up in a rank, before and right after its import."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path

from hpcdl import __version__
from hpcdl.cluster.local import BINDING_VARIABLE

INTRA_OP_VARIABLE = "HPCDL_INTRA_OP_THREADS"
INTER_OP_VARIABLE = "HPCDL_INTER_OP_THREADS"


def bind(local_rank: int) -> None:
    """Give this process the CPUs that the launch plan has for it; must come before TensorFlow makes its threads."""
    cpus_by_local_rank = json.loads(os.environ.get(BINDING_VARIABLE, "[]"))
    if local_rank < len(cpus_by_local_rank) and cpus_by_local_rank[local_rank]:
        os.sched_setaffinity(0, cpus_by_local_rank[local_rank])


def claim_gpu(local_rank: int) -> None:
    """Show this process one GPU, by its local rank; must come before TensorFlow's import.

    Untested on hardware. A CUDA_VISIBLE_DEVICES of the scheduler's is narrowed, not widened.
    """
    visible = [item for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item]
    if len(visible) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[local_rank % len(visible)]
    elif not visible and "CUDA_VISIBLE_DEVICES" not in os.environ and Path("/dev/nvidia0").exists():
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)


def silence() -> None:
    """Keep TensorFlow's chatter out of the user's sight; must come before its import."""
    if not os.environ.get("HPCDL_VERBOSE"):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def configure(*, deterministic: bool, seed: int, precision: str = "float32") -> tuple[int, int]:
    """Set threads, determinism and seeds; returns the intra-op and inter-op thread counts in force.

    Threads come from the launch plan's environment. A deterministic run without a plan uses one intra-op thread,
    because sums that are split over threads differ with their number.
    """
    import keras
    import tensorflow as tf

    default = 1 if deterministic else 0
    intra_op = int(os.environ.get(INTRA_OP_VARIABLE, default))
    inter_op = int(os.environ.get(INTER_OP_VARIABLE, 2 if deterministic else 0))
    tf.config.threading.set_intra_op_parallelism_threads(intra_op)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    keras.utils.set_random_seed(seed)
    keras.mixed_precision.set_global_policy(precision)
    for gpu in tf.config.list_physical_devices("GPU"):  # each rank sees its own one alone: see `claim_gpu`
        tf.config.experimental.set_memory_growth(gpu, True)
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
