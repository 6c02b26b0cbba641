"""Which process of this node died first: each rank holds a line to the process that started it, and the kernel cuts it.

A launcher kills the others once it sees that a rank has let go of its files, and on a full machine the kernel may have
buried all of them before the rank that was first has left the table of processes. Its files tell the truth: a process
lets go of the one with the highest number first, so that a line with a high number is cut before the launcher learns
of anything. Processes that hold no line, and those that have handed theirs to a child, are watched by their pidfd.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct

HIGH = 240
"""A file number above those of what launchers leave open in their ranks."""
_PEER = struct.Struct("3i")
"""What SO_PEERCRED tells: process, user and group."""


def hold_line(launch: str) -> None:
    """Tie this process, until it ends, to the DeathWatch of the same `launch`; nothing on a node where that is not."""
    with socket.socket(socket.AF_UNIX) as line, contextlib.suppress(OSError):
        line.connect(_address(launch))
        fcntl.fcntl(line.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)


def _address(launch: str) -> str:
    """A name in the kernel alone, which goes with the process that has it."""
    return f"\0hpcdl-{launch}"


class DeathWatch:
    """Watches process ids, and every process that holds a line to `launch`; `poll` names those that have ended."""

    def __init__(self, launch: str) -> None:
        self._ready = select.epoll()  # hands events out in the order in which they came, unlike poll
        self._pid_of: dict[int, int] = {}
        self._watched: set[int] = set()
        self._told: set[int] = set()
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(_address(launch))
        self._door.listen(socket.SOMAXCONN)
        self._door.setblocking(False)
        self._ready.register(self._door, select.EPOLLIN)

    def add(self, pid: int) -> None:
        """Watch `pid` too, whether it holds a line or not."""
        if pid in self._watched:
            return
        self._watched.add(pid)
        with contextlib.suppress(OSError):  # it has ended already, or the kernel knows no pidfd: the launcher will tell
            self._register(os.pidfd_open(pid), pid)

    def poll(self, timeout_s: float) -> list[int]:
        """Wait up to `timeout_s` for an end; returns the process ids that ended since the last call, in order."""
        ended = []
        for descriptor, _ in self._ready.poll(timeout_s):
            if descriptor == self._door.fileno():
                self._let_in()
                continue
            self._ready.unregister(descriptor)
            os.close(descriptor)
            pid = self._pid_of.pop(descriptor)
            if pid not in self._told:
                self._told.add(pid)
                ended.append(pid)
        return ended

    def close(self) -> None:
        """Stop watching."""
        for descriptor in self._pid_of:
            os.close(descriptor)
        self._pid_of.clear()
        self._door.close()
        self._ready.close()

    def _let_in(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self._door.accept()
                credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                pid, user, _group = _PEER.unpack(credentials)
                if user == os.getuid():  # the kernel's names are open to every user of the node
                    self._register(line.detach(), pid)

    def _register(self, descriptor: int, pid: int) -> None:
        self._ready.register(descriptor, select.EPOLLIN)
        self._pid_of[descriptor] = pid
