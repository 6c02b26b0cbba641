"""Checks that end a run which has gone wrong: NaN, ranks that differ, weights that drift apart."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from hpcdl.comm.arithmetic import all_finite
from hpcdl.core.errors import HpcdlError, NotFiniteError, UsageError
from hpcdl.core.protocols import Communicator


def check_kept(arrays: Iterable[tuple[str, Any]], step: int, rank: int) -> None:
    """NotFiniteError where one of `arrays`, which are about to be kept, holds NaN or infinity."""
    for name, array in arrays:
        if numpy.issubdtype(array.dtype, numpy.floating) and not all_finite(array.reshape(-1)):
            raise NotFiniteError(f"{name} is not finite after step {step} on rank {rank}, and is not kept")


def check_same_weights(variables: Mapping[str, Any], group: Communicator, when: str, remedy: str) -> None:
    """HpcdlError on every rank where `variables`, or arrays, are not bitwise the same on all; collective.

    They are held against each other in order: names, which Keras may number otherwise on another rank, are for the
    error alone. It names the first that differs, and the ranks, `when` (`after step 10`), and the `remedy`.
    """
    if group.size == 1:
        return
    gathered = group.allgather_json([digest_of(variable) for variable in variables.values()])
    names = [*variables, *["a variable that this rank has not got"] * max(map(len, gathered))]
    for name, column in zip(names, itertools.zip_longest(*gathered, fillvalue=""), strict=False):
        usual = max(set(column), key=lambda digest: (column.count(digest), -column.index(digest)))
        odd = [str(rank) for rank, digest in enumerate(column) if digest != usual]
        if odd:
            raise HpcdlError(f"weights differ over the ranks {when}: {name} on rank {', '.join(odd)}; {remedy}")


def digest_of(variable: Any) -> str:
    """A digest of a variable's or array's type, shape and bytes."""
    value = variable.numpy() if hasattr(variable, "numpy") else numpy.asarray(variable)
    digest = hashlib.blake2b(f"{value.dtype} {value.shape}".encode(), digest_size=8)
    digest.update(value.tobytes())
    return digest.hexdigest()


def check_same_start(facts: Mapping[str, str], communicator: Communicator) -> None:
    """UsageError on every rank where `facts` (name to value) differ over the ranks; names the first difference."""
    gathered = communicator.allgather_json(dict(facts))
    for name in facts:
        for rank, other in enumerate(gathered):
            if other.get(name) != gathered[0][name]:
                raise UsageError(
                    f"ranks differ in {name}: rank 0 has {gathered[0][name]}, rank {rank} has {other.get(name)}; "
                    "start every rank with the same command, software and data"
                )
