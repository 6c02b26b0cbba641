"""`hpcdl.DistributedOptimizer`: any Keras optimizer, with gradients averaged over the ranks before it applies them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hpcdl.core.errors import UsageError
from hpcdl.training.keras.session import communicator, size


def DistributedOptimizer(optimizer: Any, strategy: str = "ring", **exchange: Any) -> Any:  # noqa: N802  as Keras names
    """A Keras optimizer like `optimizer` that averages gradients over the ranks before it applies them.

    `strategy` is one whose features say `keras_fit`; `exchange` takes `bucket_size` and `compress`. The optimizer is
    saved with a model under its own Keras class, so the model loads without hpcdl. XLA cannot compile the exchange:
    leave `jit_compile` at its default on CPUs, or set it to False. Under the global policy `mixed_float16` it scales
    the loss, outside the exchange: all ranks then skip the same steps.
    """
    import keras

    from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
    from hpcdl.strategies.base import Context
    from hpcdl.strategies.table import find_strategy, load_strategy

    info = find_strategy(strategy)
    if not info.features.keras_fit:
        raise UsageError(f"strategy {strategy!r} does not go with Keras fit; `hpcdl strategies --json` shows which do")
    context = Context(
        info=info,
        communicator=communicator(),
        num_workers=size(),
        num_servers=0,
        exchange=dataclasses.replace(ExchangeConfig(strategy=strategy), **exchange),
        optimizer=OptimizerConfig(),
    )
    worker: Any = load_strategy(info).worker(context)
    scaler = keras.optimizers.LossScaleOptimizer
    if keras.mixed_precision.global_policy().name == "mixed_float16" and not isinstance(optimizer, scaler):
        optimizer = scaler(optimizer)
    plain = type(optimizer)
    worker.checks_finite = not isinstance(optimizer, scaler)

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        names = [item.path for item in trainable_variables or self._trainable_variables]
        plain.apply(self, worker.average(list(grads), names), trainable_variables)

    # The same module and name: Keras then writes the plain class into saved models.
    members = {"apply": apply, "__module__": plain.__module__, "__qualname__": plain.__qualname__, "exchanges": True}
    distributed: Any = type(plain.__name__, (plain,), members)
    return distributed.from_config(optimizer.get_config())
