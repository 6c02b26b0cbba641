"""The slots on which a run's ranks may start: which nodes of the job are excluded, and which of them may return."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable

from hpcdl.cluster.launchers.base import LEFT_OUT_VARIABLE, Launcher, ranks_per_node
from hpcdl.cluster.status import same_host
from hpcdl.core.errors import RankError

MOST_FAILURES = 2
"""A node with this many failures in a run is excluded for good."""


class RankSlots:
    """The slots for a run's ranks: the nodes of its job except the excluded ones, each with as many ranks as at first.

    Without a list of nodes (this node only): the first number of ranks, less those that were lost repeatedly.
    """

    def __init__(self, launcher: Launcher, num_ranks: int) -> None:
        self._launcher = launcher
        hosts = launcher.hosts(os.environ)
        self._nodes = hosts if len(hosts) > 1 else []
        self._per_node = ranks_per_node(hosts, num_ranks)
        self._planned = self._num_alone = num_ranks
        self._failures: Counter[object] = Counter()
        self._silent: dict[str, int] = {}
        self._left_out: list[str] = []
        self._slow: list[str] = []
        self._has_lost = False

    @property
    def num_ranks(self) -> int:
        """The number of ranks that may be started."""
        left = len(self._nodes) - len(self._left_out)
        return left * self._per_node if self._nodes else self._num_alone

    @property
    def num_nodes(self) -> int:
        """The number of nodes on which ranks may be started."""
        return len(self._nodes) - len(self._left_out) if self._nodes else 1

    @property
    def environment(self) -> dict[str, str]:
        """The variable that names the excluded nodes to the launcher; set after a loss even if none is excluded."""
        # Even if empty: srun then shares cores with the earlier step, which may never end (slurm.py).
        return {LEFT_OUT_VARIABLE: ",".join(self._left_out)} if self._has_lost else {}

    def gone(self, named: str = "") -> list[str]:
        """Return the nodes in use that the scheduler reports as gone, and the one called `named`."""
        if not self._nodes:
            return []
        gone = {*self._launcher.lost_hosts({**os.environ, **self.environment}), named}
        return [node for node in self._in_use() if any(same_host(node, name) for name in gone)]

    def leave_out(self, error: RankError, newest: int, enough: Callable[[int], bool]) -> str:
        """Exclude nodes or slots after the loss `error`, and describe them; an empty text if nothing changes.

        A node is excluded if it is gone or has lost ranks twice. Without a list of nodes, the slot of a rank is
        excluded if the rank was lost twice after the same checkpoint, `newest`. What is not gone stays in use if the
        number of ranks without it would not be `enough`.
        """
        self._has_lost = bool(self._nodes)
        return self._left_out_after(error, newest, enough)

    def _left_out_after(self, error: RankError, newest: int, enough: Callable[[int], bool]) -> str:
        if error.evicted:
            return self._leave_out_evicted(error, enough)
        if not self._nodes:
            self._failures[newest, error.rank] += 1
            if self._failures[newest, error.rank] < MOST_FAILURES or not enough(self.num_ranks - 1):
                return ""
            self._num_alone -= 1
            return f"the place of rank {error.rank}, lost twice, is left out"
        if lost := self.gone(error.node):
            self._left_out += lost
            # Ranks that do not answer and then their node being gone are one failure, if no step came between.
            self._failures.update(node for node in lost if self._silent.pop(node, None) != newest)
            message = f"{_listed(lost)} left out"
            over = [node for node in lost if self._failures[node] >= MOST_FAILURES]
            return f"{message}, {' and '.join(over)} for good (it has failed twice)" if over else message
        for node in self._in_use():
            if not same_host(node, error.host):
                continue
            self._failures[node] += 1
            self._silent[node] = newest
            if self._failures[node] >= MOST_FAILURES and enough(self.num_ranks - self._per_node):
                self._left_out.append(node)
                return f"{node}, on which ranks were lost twice, is left out"
        return ""

    def _leave_out_evicted(self, error: RankError, enough: Callable[[int], bool]) -> str:
        """Exclude the slot of a rank that is too slow, or its node if there are several, if enough ranks are left."""
        if not enough(self.num_ranks - (self._per_node if self._nodes else 1)):
            return ""
        if not self._nodes:
            self._num_alone -= 1
            return f"the place of rank {error.rank} is left out"
        nodes = [node for node in self._in_use() if same_host(node, error.host)]
        self._left_out += nodes
        self._slow += nodes
        return f"{nodes[0]} is left out" if nodes else ""

    def _in_use(self) -> list[str]:
        return [node for node in self._nodes if node not in self._left_out]

    @property
    def failed_twice(self) -> list[str]:
        """The excluded nodes that do not come back."""
        return [node for node in self._left_out if self._failures[node] >= MOST_FAILURES]

    def awaited(self, *, asked: bool) -> list[str]:
        """Return the excluded nodes that may come back: those that were gone, and slow ones if the user has `asked`."""
        return [
            node
            for node in self._left_out
            if self._failures[node] < MOST_FAILURES and (asked or node not in self._slow)
        ]

    def back(self, *, asked: bool) -> list[str]:
        """Return the awaited nodes on which ranks can probably start again; may take seconds."""
        awaited = self.awaited(asked=asked)
        answering = self._launcher.answering(awaited, os.environ) if awaited else set()
        return [node for node in awaited if any(same_host(node, name) for name in answering)]

    def num_ranks_with(self, back: Iterable[str], *, asked: bool) -> int:
        """Return the number of ranks with the nodes `back` in use; without a list of nodes, a request is enough."""
        if not self._nodes:
            return self._planned if asked else self._num_alone
        return min(self.num_ranks + len([*back]) * self._per_node, self._planned)

    def take(self, back: Iterable[str], *, asked: bool) -> str:
        """Use the nodes `back` again, and describe them."""
        if not self._nodes:
            self._num_alone = self.num_ranks_with((), asked=asked)
            self._failures.clear()
            return "more workers were asked for"
        back = [*back]
        self._left_out = [node for node in self._left_out if node not in back]
        self._slow = [node for node in self._slow if node not in back]
        return f"{_listed(back)} back"


def _listed(nodes: list[str]) -> str:
    return f"{' and '.join(nodes)} {'is' if len(nodes) == 1 else 'are'}"
