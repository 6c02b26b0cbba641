"""From settings to the environment that a rank starts in, each variable from one rule."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping

from hpcdl.node.engine import preload_path
from hpcdl.node.settings import Settings

INTRA_OP, INTER_OP = "HPCDL_INTRA_OP_THREADS", "HPCDL_INTER_OP_THREADS"
"""Read by the training entry, which hands them to tf.config.threading."""
GLIBC_TUNED = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184"
"""Freed buffers stay with the process: no page faults at every step."""

ALLOCATOR = "HPCDL_ALLOCATOR"
"""The name of what is preloaded: for records, which hold no paths, and for the check that it was."""
ONEDNN = "TF_ENABLE_ONEDNN_OPTS"

Rule = Callable[[Settings], Mapping[str, str]]


def environment_of(settings: Settings, *, openmp: bool) -> dict[str, str]:
    """The variables of `settings`; OMP_* and KMP_* only for an engine that honours them (`openmp`)."""
    rules = (*RULES, *(OPENMP_RULES if openmp else ()))
    return {name: value for rule in rules for name, value in rule(settings).items()}


def _threads(settings: Settings) -> Mapping[str, str]:
    # TensorFlow's own variables act where a script never calls tf.config (process_util.cc, local_device.cc).
    counts = {
        (INTRA_OP, "TF_NUM_INTRAOP_THREADS"): settings.intra_op_threads,
        (INTER_OP, "TF_NUM_INTEROP_THREADS"): settings.inter_op_threads,
    }
    return {name: str(count) for names, count in counts.items() if count is not None for name in names}


def _engine(settings: Settings) -> Mapping[str, str]:
    found = {}
    if settings.onednn is not None:
        found[ONEDNN] = "1" if settings.onednn else "0"
    if settings.onednn_isa != "default":
        found["ONEDNN_MAX_CPU_ISA"] = settings.onednn_isa
    if settings.onednn_fpmath != "default":
        # TensorFlow asks for its own variable, the library for the other: both, or neither is sure.
        found["TF_SET_ONEDNN_FPMATH_MODE"] = settings.onednn_fpmath
        found["ONEDNN_DEFAULT_FPMATH_MODE"] = settings.onednn_fpmath
    return found


def _allocator(settings: Settings) -> Mapping[str, str]:
    tunables = {"glibc-tuned": GLIBC_TUNED, "glibc-huge": f"glibc.malloc.hugetlb=1:{GLIBC_TUNED}"}
    if settings.allocator in tunables:
        return {"GLIBC_TUNABLES": tunables[settings.allocator]}
    library = preload_path(settings.allocator)
    if library is None:
        return {}
    return {
        ALLOCATOR: settings.allocator,
        "LD_PRELOAD": ":".join(filter(None, (str(library), os.environ.get("LD_PRELOAD", "")))),
    }


def _graph(settings: Settings) -> Mapping[str, str]:
    return {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"} if settings.xla else {}


def _openmp(settings: Settings) -> Mapping[str, str]:
    found = {"KMP_AFFINITY": "granularity=fine,compact,1,0"} if settings.binding != "none" else {}
    if settings.intra_op_threads is not None:
        found["OMP_NUM_THREADS"] = str(settings.intra_op_threads)
    if settings.kmp_blocktime is not None:
        found["KMP_BLOCKTIME"] = str(settings.kmp_blocktime)
    return found


RULES: tuple[Rule, ...] = (_threads, _engine, _allocator, _graph)
OPENMP_RULES: tuple[Rule, ...] = (_openmp,)


def shell_exports(environment: Mapping[str, str]) -> list[str]:
    """`export NAME=value` lines, quoted for any POSIX shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
