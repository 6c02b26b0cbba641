"""Weights that each rank of a script moves by itself, beside the ones that all ranks share.

In `fit` the variables hold this rank's weights while an epoch's steps go on, and the shared ones from their end on:
validation, callbacks, files and the weights after `fit` are the shared ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy

from hpcdl.core.errors import UsageError
from hpcdl.scripts.exchange import OWN_CHANGES, name_in, name_of
from hpcdl.scripts.process.exit import after_updates
from hpcdl.step.keras_internals import trained_by
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.supervision.safety import check_same_weights

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator
    from hpcdl.scripts.process.group import ScriptGroup
    from hpcdl.strategies.base.strategy import StrategyInfo


class OwnWeights(ABC):
    """What one optimizer trains on this rank. The layout of all flat buffers is that of its variables."""

    SHARED: ClassVar[str]
    """What a message calls the shared value of a variable, before its name."""

    def __init__(self, group: ScriptGroup, info: StrategyInfo, optimizer: Any) -> None:
        self.group = group
        self._info = info
        self._optimizer = optimizer
        self._name = name_in(group)
        self._began = False
        self._own: Array | None = None
        """This rank's weights while the variables hold the shared ones."""
        self._num_updates = 0

    @abstractmethod
    def shared(self) -> Array:
        """The weights that all ranks share, flat."""

    def own_variables(self) -> list[Any]:
        """The optimizer's variables that are a rank's own."""
        return []

    def to_center(self) -> bool:
        """Put the shared weights into the variables, and this rank's aside; whether that was to be done."""
        if not self._began or self._own is not None:
            return False
        self._own = self._flat()
        self._assign(self.shared())
        return True

    def to_own(self) -> None:
        """Put this rank's weights back."""
        if self._own is not None:
            own, self._own = self._own, None
            self._assign(own)

    def begin_epoch(self, communicator: Communicator) -> None:
        """Go on with each rank's weights; where somebody has set others since, they count for all; collective."""
        changed = self._own is not None and not numpy.array_equal(self._flat(), self.shared())
        by_rank = communicator.allgather_json([changed, self._num_updates])
        self._num_updates = max(number for _, number in by_rank)
        if any(new for new, _ in by_rank):
            self._own, self._began = None, False
            broadcast_variables(communicator, self._variables)
        self.to_own()

    def end_steps(self, last: int, *, unequal: bool, over: bool) -> None:
        """The steps of an epoch are over on all ranks: the variables hold the shared weights from here on; collective.

        `last`: a rank that took the most steps, where they are `unequal`. `over`: the fit ends with this epoch.
        """
        self.to_center()

    def say_period(self, steps: int | None) -> None:  # noqa: B027  a center holds ranks together
        """Tell of a period that is long beside a fit's epoch of so many steps, None where nobody knows."""

    def _check_types(self, variables: Sequence[Any]) -> None:
        """UsageError for a type that flat buffers of float32 do not hold."""
        odd = sorted({one.dtype.name for one in variables} - {"float32"})
        if odd:
            raise UsageError(
                f"strategy={self._info.name!r} keeps its weights in float32, the model has {', '.join(odd)} ones; "
                "use strategy='ring'"
            )

    def _compare(self) -> None:
        """Look whether all ranks hold the same shared weights; collective."""
        parts = zip(self._names, self._parts(self.shared()), strict=True)
        named = {f"{index}: {self.SHARED} {name}": part for index, (name, part) in enumerate(parts)}
        check_same_weights(named, self.group.messages, self._after(), OWN_CHANGES)

    @property
    def _names(self) -> list[str]:
        return [name_of(one) for one in self._variables]

    @property
    def _forms(self) -> list[str]:
        """What all ranks must have alike; the names beside it are an empty one and `_names`."""
        return [self._name, *(str(tuple(one.shape)) for one in self._variables)]

    def _after(self) -> str:
        return after_updates(self._num_updates)

    @property
    def _variables(self) -> list[Any]:
        return trained_by(self._optimizer)

    @property
    def _lengths(self) -> list[int]:
        return [int(numpy.prod(one.shape)) for one in self._variables]

    def _flat(self) -> Array:
        return numpy.concatenate([numpy.asarray(one.numpy()).reshape(-1) for one in self._variables])

    def _parts(self, flat: Array) -> list[Array]:
        return list(numpy.split(flat, numpy.cumsum(self._lengths)[:-1]))

    def _assign(self, flat: Array) -> None:
        for variable, part in zip(self._variables, self._parts(flat), strict=True):
            variable.assign(part.reshape(variable.shape))
