"""hpcdl: distributed deep learning for HPC centres, from one node to the whole machine.

In a Keras script: `hpcdl.init()`, `hpcdl.DistributedOptimizer(...)`, `hpcdl.callbacks()`, `hpcdl.rank()`,
`hpcdl.size()`. `hpcdl.data.open(DIR)` gives shards as a `tf.data.Dataset`. Importing hpcdl loads nothing heavy.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["DistributedOptimizer", "__version__", "callbacks", "data", "init", "rank", "size"]

_PUBLIC = dict.fromkeys(("DistributedOptimizer", "callbacks", "init", "rank", "size"), "hpcdl.training.keras.api")


def __getattr__(name: str) -> Any:
    import importlib

    if name == "data":
        return importlib.import_module("hpcdl.data")
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'hpcdl' has no attribute {name!r}")
