"""The same weights on every rank of a script: started so, and compared from then on."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.core.errors import HpcdlError
from hpcdl.strategies.allreduce.worker import broadcast_variables

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator


def start(communicator: Communicator, variables: Sequence[Any]) -> None:
    """Give every rank rank 0's values of `variables`; collective. A second time for the same ones does no harm."""
    if communicator.size > 1:
        broadcast_variables(communicator, variables)


def compare(communicator: Communicator, variables: Mapping[str, Any], when: str) -> None:
    """HpcdlError on every rank where `variables`, or arrays, are not bitwise the same on all; collective.

    They are held against each other in order: names, which Keras may number otherwise on another rank, are for the
    error alone. It names the first that differs, and the ranks; `when` is part of it: `after 1 update`.
    """
    if communicator.size == 1:
        return
    gathered = communicator.allgather_json([_digest(variable) for variable in variables.values()])
    names = [*variables, *["a variable that this rank has not got"] * max(map(len, gathered))]
    for name, column in zip(names, itertools.zip_longest(*gathered, fillvalue=""), strict=False):
        usual = max(set(column), key=lambda digest: (column.count(digest), -column.index(digest)))
        odd = [str(rank) for rank, digest in enumerate(column) if digest != usual]
        if odd:
            raise HpcdlError(
                f"ranks differ {when}: {name} on rank {', '.join(odd)}; use hpcdl.DistributedOptimizer or "
                "hpcdl.DistributedGradientTape for every update, and hpcdl.broadcast_variables for what the script "
                "sets itself"
            )


def _digest(variable: Any) -> str:
    value = variable.numpy() if hasattr(variable, "numpy") else numpy.asarray(variable)
    digest = hashlib.blake2b(f"{value.dtype} {value.shape}".encode(), digest_size=8)
    digest.update(value.tobytes())
    return digest.hexdigest()
