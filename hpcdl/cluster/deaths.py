"""Which process of this node died first: each rank holds a line to the process that started it, and the kernel cuts it.

A launcher kills the others once it sees that a rank has let go of its files, and on a full machine the kernel may have
buried all of them before the rank that was first has left the table of processes. Its files tell the truth: a process
lets go of the one with the highest number first, so that a line with a high number is cut before the launcher learns
of anything. Processes that hold no line, and those that have handed theirs to a child, are watched by their pidfd.
By its line a rank also says what becomes of it, which costs no file system anything.
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
MOST_BYTES = 64 << 10
"""Of a word; a longer one is cut."""
_PEER = struct.Struct("3i")
"""What SO_PEERCRED tells: process, user and group."""


def hold_line(launch: str) -> int | None:
    """Tie this process, until it ends, to the DeathWatch of the same `launch`; None on a node where that is not.

    Returns the line's file number, for `send_word`.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line, contextlib.suppress(OSError):
        line.connect(_address(launch))
        line.setblocking(False)
        return fcntl.fcntl(line.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    return None


def send_word(line: int | None, word: bytes) -> None:
    """Send `word` down a line, if anybody hears it."""
    if line is None:
        return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(line)) as end:
        end.send(word[:MOST_BYTES], socket.MSG_NOSIGNAL)  # the script may have taken SIGPIPE for itself


def _address(launch: str) -> str:
    """A name in the kernel alone, which goes with the process that has it."""
    return f"\0hpcdl-{launch}"


class DeathWatch:
    """Watches process ids, and every process that holds a line to `launch`; `poll` names those that have ended.

    `words` has, by process id, what was last said by a line.
    """

    def __init__(self, launch: str) -> None:
        self.words: dict[int, bytes] = {}
        self._ready = select.epoll()  # hands events out in the order in which they came, unlike poll
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
        """Watch `pid` too, whether it holds a line or not."""
        if pid in self._watched:
            return
        self._watched.add(pid)
        with contextlib.suppress(OSError):  # it has ended already, or the kernel knows no pidfd: the launcher will tell
            self._register(os.pidfd_open(pid), pid)

    def poll(self, timeout_s: float) -> list[int]:
        """Wait up to `timeout_s` for an end; returns the process ids that ended since the last call, in order."""
        ended: list[int] = []
        for descriptor, _ in self._ready.poll(timeout_s):
            if descriptor == self._door.fileno():
                # Who is gone by now has hardly begun: that is a cause, and who is told of next may be killed for it.
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
        """The lines of all who have come to the door."""
        found = []
        with contextlib.suppress(BlockingIOError):
            while True:
                line, _ = self._door.accept()
                credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                pid, user, _group = _PEER.unpack(credentials)
                if user == os.getuid():  # the kernel's names are open to every user of the node
                    line.setblocking(False)
                    self._lines.add(line.fileno())
                    found.append(line.fileno())
                    self._register(line.detach(), pid)
        return found

    def _over(self, descriptor: int) -> list[int]:
        """Whose line or pidfd that was, unless that is known already."""
        self._ready.unregister(descriptor)
        os.close(descriptor)
        self._lines.discard(descriptor)
        pid = self._pid_of.pop(descriptor)
        if pid in self._reported:
            return []
        self._reported.add(pid)
        return [pid]

    def _continues(self, line: int) -> bool:
        """Take in what has been said; False once the line is cut."""
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
