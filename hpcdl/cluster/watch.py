"""Sees processes of this host end, in the order in which they do, whoever started them."""

from __future__ import annotations

import os
import select


class DeathWatch:
    """Watches process ids; `poll` names those that have ended since the last call, in order."""

    def __init__(self) -> None:
        self._ready = select.epoll()  # hands events out in the order in which they came, unlike poll
        self._pid_of: dict[int, int] = {}
        self._seen: set[int] = set()

    def add(self, pid: int) -> None:
        """Watch `pid`; one that has ended already is reported by the next poll."""
        if pid in self._seen:
            return
        self._seen.add(pid)
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # ended before it could be watched, or no pidfd on this kernel: the launcher will tell
            return
        self._pid_of[descriptor] = pid
        self._ready.register(descriptor, select.EPOLLIN)

    def poll(self, timeout_s: float) -> list[int]:
        """Wait up to `timeout_s` for an end; returns the process ids that ended."""
        ended = []
        for descriptor, _ in self._ready.poll(timeout_s):
            self._ready.unregister(descriptor)
            os.close(descriptor)
            ended.append(self._pid_of.pop(descriptor))
        return ended

    def close(self) -> None:
        """Stop watching."""
        for descriptor in self._pid_of:
            os.close(descriptor)
        self._pid_of.clear()
        self._ready.close()
