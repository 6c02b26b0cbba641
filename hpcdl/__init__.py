"""hpcdl: distributed deep learning for HPC centres, from one node to the whole machine.

In a Keras script: `hpcdl.init()`, `hpcdl.DistributedOptimizer(...)`, `hpcdl.callbacks()`, `hpcdl.rank()`,
`hpcdl.size()`. `hpcdl.data.open(DIR)` gives shards as a `tf.data.Dataset`. Importing hpcdl loads nothing heavy.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from hpcdl.core.processes.streams import open_closed

open_closed()  # before any other file is opened, here or in a script; does nothing if no stream is closed

__version__ = "0.3.0"

_MODULES = {
    "process.session": ("init", "shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "node_rank"),
    "collectives.primitives": (
        *("Sum", "Mean", "Average", "Min", "Max", "Product"),
        *("allreduce", "grouped_allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join"),
        *("ProcessSet", "broadcast_object", "allgather_object", "broadcast_variables"),
    ),
    "optimizer": ("DistributedOptimizer", "DistributedGradientTape", "load_model"),
    "callbacks": ("callbacks",),
    "fit.model": ("center_in_place",),
    "fit.variables": ("combine",),
    "fit.adapted": ("adapt",),
    "fit.files": ("on_rank_0",),
    "fit.metrics": ("Gathered",),
    "process.measure": ("fast_kernels",),
    "fit.deferred": ("background",),
    "fit.learning_rate": ("learning_rate_schedule", "learning_rate_warmup"),
    "state": ("State",),
    "dataset": ("dataset",),
}
"""The public names for scripts, by the module of scripts/ that defines them."""
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}
__all__ = ["__version__", "data", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "data":
        return importlib.import_module("hpcdl.data")
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"hpcdl.scripts.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'hpcdl' has no attribute {name!r}")


class _Package(ModuleType):
    """This package: a public name keeps its meaning, even if a subpackage of the same name is imported (rank/, say)."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Python binds an imported submodule to its package, which would hide `hpcdl.rank()`.
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
