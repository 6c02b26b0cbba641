"""A port for a server that another library starts: reserved until that library has bound it."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class ReservedPort:
    """A free port that no other user can take; used as a context manager around the start of the server.

    The reservation listens to nobody. It is bound with SO_REUSEPORT, so a server of the same user that sets it too
    (TensorFlow's does with TF_GRPC_REUSE_PORT) can bind the port beside it. The kernel picks the port: there is no
    moment at which it is known and free to take.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET6 if _has_ipv6() else socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if self._socket.family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("", 0))
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Give the reservation back; the server's own binding stays."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True
