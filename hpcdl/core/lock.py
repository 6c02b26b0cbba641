"""One writer at a time: an advisory lock on the target that the writer's death releases."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcdl.core.errors import UsageError
from hpcdl.core.files import parse_json

FILE_NAME = ".hpcdl-lock"
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")


@contextmanager
def writing(folder: Path, patience_s: float = 0.0) -> Iterator[None]:
    """Hold `folder` for writing; UsageError where another process does so for `patience_s`: its host, pid and job.

    Where the file system has no flock, the record in the lock file stands in for it: it is taken over where its process
    is known to be dead, that is on the same host.
    """
    path = folder / FILE_NAME
    descriptor = _locked(path, time.monotonic() + patience_s)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        os.close(descriptor)


def check_free(folder: Path) -> None:
    """UsageError where another process holds `folder` for writing."""
    with suppress(FileNotFoundError, PermissionError):
        path = folder / FILE_NAME
        descriptor = _opened(path, os.O_RDWR)
        try:
            _take(descriptor, path)
        finally:
            os.close(descriptor)


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:  # a folder, a socket, links in a circle: not what hpcdl left
        raise UsageError(f"cannot open the lock {path} ({error.strerror}); remove it") from error


def _locked(path: Path, deadline: float) -> int:
    while True:
        descriptor = _opened(path, os.O_RDWR | os.O_CREAT)
        try:
            _take(descriptor, path)
        except UsageError:
            os.close(descriptor)
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.1)
            continue
        except BaseException:
            os.close(descriptor)
            raise
        # The holder before may have removed the file between our open and our lock: then lock the new one.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_record()).encode(), 0)
                return descriptor
        os.close(descriptor)


def _take(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise _held(path, descriptor) from None
        if error.errno not in _NO_FLOCK:
            raise
        if _alive(_read(descriptor)):
            raise _held(path, descriptor) from None


def _record() -> dict[str, str | int]:
    job = next((f"{name}={os.environ[name]}" for name in _JOB_VARIABLES if name in os.environ), "")
    return {"host": socket.gethostname(), "pid": os.getpid(), "job": job}


def _read(descriptor: int) -> dict[str, object]:
    try:
        found = parse_json(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _alive(record: dict[str, object]) -> bool:
    """Whether the recorded process may still be there; one on another host always may."""
    if not record:
        return False
    pid = record.get("pid")
    if record.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _held(path: Path, descriptor: int) -> UsageError:
    record = _read(descriptor)
    job = f", job {record['job']}" if record.get("job") else ""
    who = f"pid {record.get('pid', '?')} on {record.get('host', '?')}{job}"
    return UsageError(
        f"another hpcdl writes to {path.parent} ({who}); wait for it, or remove {path} if it is surely gone"
    )
