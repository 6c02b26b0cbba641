from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.core.storage.lock import FILE_NAME, writing


def test_held_freed_and_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    with writing(tmp_path):
        record = json.loads((tmp_path / FILE_NAME).read_text())
        assert record == {"host": socket.gethostname(), "pid": os.getpid(), "job": "SLURM_JOB_ID=77"}
        with pytest.raises(UsageError, match=f"pid {os.getpid()} on .*job SLURM_JOB_ID=77"), writing(tmp_path):
            pass
    assert not (tmp_path / FILE_NAME).exists()
    (tmp_path / FILE_NAME).write_text(json.dumps({"host": socket.gethostname(), "pid": os.getppid(), "job": ""}))
    with writing(tmp_path):  # flock works here, so the text left by a dead writer does not count
        pass


def test_a_look_at_the_lock_does_not_refuse_a_writer(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / FILE_NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    look_ends = threading.Timer(0.05, os.close, (descriptor,))
    look_ends.start()
    with writing(tmp_path):
        look_ends.join()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_there_is_no_flock_the_record_decides(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with writing(tmp_path), pytest.raises(UsageError, match="another hpcdl writes"), writing(tmp_path):
        pass
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps({"host": socket.gethostname(), "pid": child, "job": ""}))
    with writing(tmp_path):  # its process is dead
        pass
    path.write_text(json.dumps({"host": "another-node", "pid": child, "job": "SLURM_JOB_ID=5"}))
    with pytest.raises(UsageError, match="another-node, job SLURM_JOB_ID=5"), writing(tmp_path):
        pass
    path.write_text("")
    with writing(tmp_path):
        pass


def test_a_folder_that_may_not_be_written_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = r"cannot write /sys/.hpcdl-lock: .*; choose another folder, or a copy of this one where you may write"
    with pytest.raises(UsageError, match=where), writing(Path("/sys")):  # where root cannot write either
        pass
    open_as_usual = os.open

    def refuse(path: object, *flags: int, **folder: int) -> int:
        if path == FILE_NAME:
            raise OSError(number, os.strerror(number))
        return open_as_usual(path, *flags, **folder)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    for number, kind in ((errno.EROFS, UsageError), (errno.ENOSPC, OSError)):
        with pytest.raises(kind, match=os.strerror(number)), writing(tmp_path):
            pass
