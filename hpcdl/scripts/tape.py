"""`hpcdl.DistributedGradientTape`: a gradient tape whose gradients are combined over the ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.collectives.arrays import unconverted
from hpcdl.scripts.collectives.process_set import ProcessSet, group_of
from hpcdl.scripts.exchange import ExchangeSettings, GradientExchange, keeps_rest, key_of, make_alike
from hpcdl.scripts.existing import existing_alike
from hpcdl.scripts.process.kernels import use_kernels_of_launch


class DistributedGradientTape:
    """`tape`, whose `gradient` is the mean over the ranks; the same settings as DistributedOptimizer.

    Used in place of the tape or around it, before or after it has recorded. Variables whose gradient is asked for get
    rank 0's values before the first step, and are compared over the ranks after the first one and now and then.
    """

    def __init__(
        self,
        tape: Any = None,
        *,
        strategy: str = "ring",
        op: str = "mean",
        compress: str = "none",
        bucket_size: int | str = "25MiB",
        process_set: ProcessSet | None = None,
        gradient_predivide_factor: float = 1.0,
        sparse_as_dense: bool = False,
        average_over: str = "ranks",
        groups: int | Sequence[Sequence[Any]] | None = None,
        servers: int | None = None,
    ) -> None:
        self._tape = tf.GradientTape() if tape is None else tape
        self._group = group_of(process_set)
        use_kernels_of_launch()
        if tape is None and tf.executing_eagerly():  # else a forward pass has been, or none has used a value yet
            self._group.keep("weights before the first tape", lambda: existing_alike(self._group))
        if keeps_rest(compress):
            raise UsageError(
                f"compress={compress!r}: nobody keeps what it leaves over of a tape's gradients; use "
                "hpcdl.DistributedOptimizer, or 'fp16' or 'bf16' here"
            )
        self._settings = ExchangeSettings(
            strategy=strategy,
            op=op,
            compress=compress,
            bucket_size=bucket_size,
            gradient_predivide_factor=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            average_over=average_over,
            groups=groups,
            servers=servers,
        )

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tape.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    @unconverted
    def gradient(self, target: Any, sources: Any, *args: Any, num_samples: Any = None, **kwargs: Any) -> Any:
        """The combined gradients, in the structure of `sources`; `num_samples` for `average_over="samples"`."""
        flat = tf.nest.flatten(sources)
        own = self._tape.gradient(target, flat, *args, **kwargs)
        variables = [source for source in flat if hasattr(source, "assign")]
        exchange = self._exchange(variables)
        make_alike(self._group, variables)
        combined = exchange.combine(own, flat, num_samples)
        return tf.nest.pack_sequence_as(sources, combined) if tf.nest.is_nested(sources) else combined[0]

    def _exchange(self, variables: Sequence[Any]) -> GradientExchange:
        """One for all tapes that ask for these variables' gradients, step by step."""
        group, settings = self._group, self._settings
        keys = tuple(key_of(variable) for variable in variables)
        held = [weakref.ref(variable) for variable in variables]

        def compared() -> list[Any]:
            return [variable for variable in (reference() for reference in held) if variable is not None]

        with tf.init_scope():
            return group.keep((repr(settings), keys), lambda: GradientExchange(group, settings, compared))
