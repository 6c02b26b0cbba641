"""The same weights on every rank of a script: started so, and compared from then on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcdl.core.errors import HpcdlError
from hpcdl.strategies.allreduce.worker import broadcast_variables

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator


def start(communicator: Communicator, variables: Sequence[Any]) -> None:
    """Give every rank rank 0's values of `variables`; collective. A second time for the same ones does no harm."""
    if communicator.size > 1:
        broadcast_variables(communicator, variables)


def compare(communicator: Communicator, variables: Mapping[str, Any], when: str) -> None:
    """HpcdlError on every rank where `variables` (by name) are not bitwise the same on all; collective.

    `when` ends the sentence: `after step 1`. The error names the first variable that differs, and the ranks.
    """
    if communicator.size == 1:
        return
    digests = {name: _digest(variable) for name, variable in variables.items()}
    gathered = communicator.allgather_json(digests)
    for name in dict.fromkeys(name for row in gathered for name in row):
        column = [row.get(name, "") for row in gathered]
        usual = max(set(column), key=lambda digest: (column.count(digest), -column.index(digest)))
        odd = [str(rank) for rank, digest in enumerate(column) if digest != usual]
        if odd:
            missing = " (which some ranks have not got)" if "" in column else ""
            raise HpcdlError(
                f"ranks differ {when}: {name}{missing} on rank {', '.join(odd)}; start every rank with the same "
                "script and data shapes, use hpcdl.DistributedOptimizer or hpcdl.DistributedGradientTape for every "
                "update, and hpcdl.broadcast_variables for what the script sets itself"
            )


def _digest(variable: Any) -> str:
    value = variable.numpy()
    digest = hashlib.blake2b(f"{value.dtype} {value.shape}".encode(), digest_size=8)
    digest.update(value.tobytes())
    return digest.hexdigest()
