"""Some of a script's ranks as a group of their own, for primitives, tapes and optimizers."""

from __future__ import annotations

from collections.abc import Sequence

from hpcdl.core.errors import UsageError
from hpcdl.scripts.process.group import ScriptGroup
from hpcdl.scripts.process.session import session


class ProcessSet:
    """The ranks `ranks`, by number; every rank of the job makes it, in the same order as other sets. Collective.

    Those that are not in it have it too, so that they know; they may not compute with it.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        world = session()
        size = world.communicator.size
        self.ranks: tuple[int, ...] = tuple(sorted(set(ranks)))
        if not self.ranks or self.ranks[0] < 0 or self.ranks[-1] >= size:
            raise UsageError(f"ProcessSet({list(ranks)}): name at least one rank, each from 0 to {size - 1}")
        world.group.agree(f"hpcdl.ProcessSet({list(self.ranks)})")
        part = world.communicator.split(int(world.communicator.rank in self.ranks), world.communicator.rank)
        self._group = ScriptGroup(part) if self.included() else None

    def included(self) -> bool:
        """Whether this rank is in it."""
        return session().communicator.rank in self.ranks

    def rank(self) -> int:
        """This rank's number within the set; UsageError where it is not in it."""
        return self.group.rank

    def size(self) -> int:
        """Number of ranks in the set."""
        return len(self.ranks)

    @property
    def group(self) -> ScriptGroup:
        """What collectives of the set go through; UsageError on a rank that is not in it."""
        if self._group is None:
            raise UsageError(
                f"rank {session().communicator.rank} is not in ProcessSet({list(self.ranks)}); "
                "call this on the set's ranks alone (if process_set.included())"
            )
        return self._group


def group_of(process_set: ProcessSet | None) -> ScriptGroup:
    """The set's group; without a set that of all ranks."""
    return session().group if process_set is None else process_set.group
