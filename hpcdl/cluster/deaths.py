"""The first process that died on this node: each rank holds a socket to its starter, which the kernel closes.

A launcher kills the other ranks when it sees a rank close its files. On a busy machine all of them may be gone before
the first one leaves the process table. The files show the order, because a process closes its highest file number
first. So a line (socket) with a high number is cut before the launcher notices anything. Processes without a line, and
those that passed theirs to a child, are watched by their pidfd.
A rank also reports its status through its line, which needs no file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import struct

HIGH = 240
"""A file number above those that launchers leave open in their ranks."""
MOST_BYTES = 64 << 10
"""Most bytes of a message; a longer one is cut."""
_PEER = struct.Struct("3i")
"""The content of SO_PEERCRED: process, user and group."""


def hold_line(launch: str) -> int | None:
    """Connect this process, until it ends, to the DeathWatch of the same `launch`; None on a node without it.

    Returns the line's file number, for `send_word`.
    """
    # SEQPACKET keeps messages apart as datagrams do, and shows the end of the peer as streams do.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, contextlib.suppress(OSError):
        line.connect(_address(launch))
        line.setblocking(False)
        # A program that the rank starts must not keep it open.
        return fcntl.fcntl(line.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    return None


def send_word(line: int | None, word: bytes) -> None:
    """Send `word` down a line, if there is one."""
    if line is None:
        return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line)) as end:
        end.send(word[:MOST_BYTES], socket.MSG_NOSIGNAL)  # the script may handle SIGPIPE itself


def _address(launch: str) -> str:
    """Return an abstract socket name, which exists in the kernel only and disappears with its process."""
    return f"\0hpcdl-{launch}"


class DeathWatch:
    """Watches process ids, and every process that holds a line to `launch`; `poll` names those that have ended.

    `words` holds the last message of each line, by process id.
    """

    def __init__(self, launch: str) -> None:
        self.words: dict[int, bytes] = {}
        self._ready = select.epoll()  # returns events in the order of arrival, unlike poll
        self._pid_of: dict[int, int] = {}
        self._watched: set[int] = set()
        self._reported: set[int] = set()
        self._lines: set[int] = set()
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._door.bind(_address(launch))
        self._door.listen(socket.SOMAXCONN)
        self._door.setblocking(False)
        self._ready.register(self._door, select.EPOLLIN)

    def add(self, pid: int) -> None:
        """Watch `pid` too, with or without a line."""
        if pid in self._watched:
            return
        self._watched.add(pid)
        with contextlib.suppress(OSError):  # it has ended, or the kernel has no pidfd: the launcher will report it
            self._register(os.pidfd_open(pid), pid)

    def poll(self, timeout_s: float) -> list[int]:
        """Wait up to `timeout_s` for an end; return the process ids that ended since the last call, in order."""
        ended: list[int] = []
        for descriptor, _ in self._ready.poll(timeout_s):
            if descriptor == self._door.fileno():
                # A new process that is gone already is a cause; the next in the list may have been killed for it.
                ended += [pid for line in self._let_in() if not self._continues(line) for pid in self._over(line)]
            elif not (descriptor in self._lines and self._continues(descriptor)):
                ended += self._over(descriptor)
        return ended

    def close(self) -> None:
        """Stop watching."""
        for descriptor in self._pid_of:
            os.close(descriptor)
        self._pid_of.clear()
        self._door.close()
        self._ready.close()

    def _let_in(self) -> list[int]:
        """Accept all pending connections, and return their lines."""
        descriptors = []
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self._door.accept()
                credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                pid, user, _group = _PEER.unpack(credentials)
                if user == os.getuid():  # abstract names are open to every user of the node
                    line.setblocking(False)
                    self._lines.add(line.fileno())
                    descriptors.append(line.fileno())
                    self._register(line.detach(), pid)
        return descriptors

    def _over(self, descriptor: int) -> list[int]:
        """Return the process of this closed line or pidfd, unless it was reported before."""
        self._ready.unregister(descriptor)  # before it is closed: a copy elsewhere would keep it registered
        os.close(descriptor)
        self._lines.discard(descriptor)
        pid = self._pid_of.pop(descriptor)
        if pid in self._reported:
            return []
        self._reported.add(pid)
        return [pid]

    def _continues(self, line: int) -> bool:
        """Read the messages of a line; return False once the line is cut."""
        try:
            while word := os.read(line, MOST_BYTES):
                self.words[self._pid_of[line]] = word
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _register(self, descriptor: int, pid: int) -> None:
        self._ready.register(descriptor, select.EPOLLIN)
        self._pid_of[descriptor] = pid
