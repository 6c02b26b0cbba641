"""One writer at a time: an advisory lock on the target, released by the death of the writer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hpcdl.core.errors import NO_PLACE, NOT_ALLOWED, UsageError
from hpcdl.core.storage.disk import cut, naming, open_folder, remove_file
from hpcdl.core.storage.files import parse_json

FILE_NAME = ".hpcdl-lock"
_LOOK_S = 0.2
"""`check_free` holds the lock for a moment, which must not refuse a writer."""
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL}
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID")
"""Variables in which batch systems store a job's number."""


@contextmanager
def writing(folder: Path, patience_s: float = 0.0, name: str = FILE_NAME) -> Iterator[None]:
    """Lock `folder` for writing. Raises UsageError if another process (host, pid, job) holds it for `patience_s`.

    The lock is a command's first file there: UsageError too if this user may write none.
    With another `name` the lock is that of one file in the folder.

    If the file system has no flock, the record in the lock file replaces it. The lock is then taken over if its process
    is known to be dead, which requires the same host.
    """
    path = folder / name
    try:
        descriptor = _locked(path, time.monotonic() + max(patience_s, _LOOK_S))
    except OSError as error:
        if isinstance(error, UsageError) or error.errno not in NOT_ALLOWED:
            raise
        what = "choose another folder, or a copy of this one where you may write"
        raise UsageError(f"cannot write {path}: {error.strerror}; {what}") from error
    try:
        yield
    finally:
        remove_file(path)  # while it is locked: later the name may be the next holder's
        os.close(descriptor)


def check_free(folder: Path) -> None:
    """Raise UsageError if another process holds `folder` for writing."""
    with suppress(FileNotFoundError, PermissionError):
        path = folder / FILE_NAME
        descriptor = _opened(path, os.O_RDONLY)
        try:
            # Shared: on NFS an exclusive lock needs a file that is open for writing, and this may be another user's.
            _take(descriptor, path, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)


def _opened(path: Path, flags: int) -> int:
    folder = open_folder(path.parent)
    try:
        with naming(path):
            descriptor = os.open(path.name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder)
    except (FileNotFoundError, PermissionError):
        raise
    except OSError as error:  # a folder, a socket or a link, which hpcdl did not leave
        if error.errno in NO_PLACE:
            raise
        what = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise UsageError(f"cannot open the lock {path} ({what}); remove it") from error
    finally:
        os.close(folder)
    return descriptor


def _check_ours(descriptor: int, path: Path) -> None:
    """Raise UsageError unless the file is plain, has one name only, and is empty or holds a record of hpcdl."""
    status = os.fstat(descriptor)
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink < 2  # a second name means another file, linked here
    if not is_plain or (status.st_size and not {"host", "pid"} <= _read(descriptor).keys()):
        raise UsageError(f"{path} is not a lock that hpcdl has written; move it away")


def _locked(path: Path, deadline: float) -> int:
    while True:
        descriptor = _opened(path, os.O_RDWR | os.O_CREAT)
        try:
            _take(descriptor, path)
            _check_ours(descriptor, path)
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
        try:
            with suppress(FileNotFoundError), naming(path):
                if os.path.samestat(os.fstat(descriptor), path.lstat()):
                    cut(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(_record()).encode(), 0)
                    return descriptor
        except OSError:  # a full disk
            remove_file(path)
            os.close(descriptor)
            raise
        os.close(descriptor)


def _take(descriptor: int, path: Path, kind: int = fcntl.LOCK_EX) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        # EACCES: NFS emulates flock by fcntl locks.
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise _held(path, descriptor) from None
        if error.errno not in _NO_FLOCK:
            raise
        if _alive(_read(descriptor)):
            raise _held(path, descriptor) from None


def job_here() -> tuple[str, str]:
    """Return the variable that names the batch job of this process, and the job's number; both empty outside a job."""
    name = next((name for name in JOB_VARIABLES if name in os.environ), "")
    return name, os.environ.get(name, "")


def _record() -> dict[str, str | int]:
    name, number = job_here()
    return {"host": socket.gethostname(), "pid": os.getpid(), "job": f"{name}={number}" if name else ""}


def _read(descriptor: int) -> dict[str, object]:
    try:
        document = parse_json(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _alive(record: dict[str, object]) -> bool:
    """Return whether the recorded process may still exist; on another host it always may."""
    if not record:
        return False
    pid = record.get("pid")
    if record.get("host") != socket.gethostname() or not isinstance(pid, int):
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, and is another user's
        return True
    return True


def _held(path: Path, descriptor: int) -> UsageError:
    record = _read(descriptor)
    job = f", job {record['job']}" if record.get("job") else ""
    what = path.parent if path.name == FILE_NAME else path.with_name(path.stem.removeprefix("."))
    who = f"pid {record.get('pid', '?')} on {record.get('host', '?')}{job}"
    return UsageError(f"another hpcdl writes to {what} ({who}); wait for it, or remove {path} if it is surely gone")
