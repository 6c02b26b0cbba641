"""Where a run's ranks may be started: which nodes of its job are left out, and which of those may come back."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable

from hpcdl.cluster.launchers.base import LEFT_OUT_VARIABLE, Launcher, ranks_per_node
from hpcdl.cluster.status import same_host
from hpcdl.core.errors import RankError

MOST_FAILURES = 2
"""A node that has failed so often in a run is not used by it any more."""


class RankSlots:
    """Where a run's ranks may be started: the nodes of its job but for those left out, as many on each as at first.

    Without nodes (this one alone): as many as there were, but for those that were lost again and again.
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
        """Ranks that may be started."""
        left = len(self._nodes) - len(self._left_out)
        return left * self._per_node if self._nodes else self._num_alone

    @property
    def num_nodes(self) -> int:
        """Nodes that ranks may be started on."""
        return len(self._nodes) - len(self._left_out) if self._nodes else 1

    @property
    def environment(self) -> dict[str, str]:
        """What tells the launcher which nodes to leave out; after a loss it hears of it, also where that is none."""
        return {LEFT_OUT_VARIABLE: ",".join(self._left_out)} if self._has_lost else {}

    def gone(self, named: str = "") -> list[str]:
        """The nodes in use that the scheduler knows to be gone, and the one that is `named`."""
        if not self._nodes:
            return []
        gone = {*self._launcher.lost_hosts({**os.environ, **self.environment}), named}
        return [node for node in self._in_use() if any(same_host(node, name) for name in gone)]

    def leave_out(self, error: RankError, newest: int, enough: Callable[[int], bool]) -> str:
        """What is left out from now on, in words; nothing where all may go on as it was.

        A node that is gone is left out, and one on which ranks have been lost twice; without nodes a rank's place, if
        it was lost twice after the same checkpoint, `newest`. What may come back stays where there would not be
        `enough` ranks without it.
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
            # Ranks that did not answer, and then their node that is gone, are one failure, if no step was between.
            self._failures.update(node for node in lost if self._silent.pop(node, None) != newest)
            words = f"{_listed(lost)} left out"
            over = [node for node in lost if self._failures[node] >= MOST_FAILURES]
            return f"{words}, {' and '.join(over)} for good (it has failed twice)" if over else words
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
        """Of a rank that is too slow: its place, and where there are several nodes its node, as long as others do."""
        if not enough(self.num_ranks - (self._per_node if self._nodes else 1)):
            return ""
        if not self._nodes:
            self._num_alone -= 1
            return f"the place of rank {error.rank} is left out"
        found = [node for node in self._in_use() if same_host(node, error.host)]
        self._left_out += found
        self._slow += found
        return f"{found[0]} is left out" if found else ""

    def _in_use(self) -> list[str]:
        return [node for node in self._nodes if node not in self._left_out]

    @property
    def failed_twice(self) -> list[str]:
        """The nodes left out that do not come back."""
        return [node for node in self._left_out if self._failures[node] >= MOST_FAILURES]

    def awaited(self, *, asked: bool) -> list[str]:
        """The nodes left out that may come back: once gone by themselves; too slow ones where the user has `asked`."""
        return [
            node
            for node in self._left_out
            if self._failures[node] < MOST_FAILURES and (asked or node not in self._slow)
        ]

    def back(self, *, asked: bool) -> list[str]:
        """Those of them that ranks can be started on again, as far as anybody knows; may take seconds."""
        awaited = self.awaited(asked=asked)
        answering = self._launcher.answering(awaited, os.environ) if awaited else set()
        return [node for node in awaited if any(same_host(node, name) for name in answering)]

    def num_ranks_with(self, back: Iterable[str], *, asked: bool) -> int:
        """Ranks that may be started once the nodes `back` are used too; without nodes the user's word is enough."""
        if not self._nodes:
            return self._planned if asked else self._num_alone
        return min(self.num_ranks + len([*back]) * self._per_node, self._planned)

    def take(self, back: Iterable[str], *, asked: bool) -> str:
        """Use the nodes `back` again; what has come back, in words."""
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
