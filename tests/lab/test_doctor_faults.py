"""Real faults, on a host of the lab, in its Slurm or in the kernel's answers: the doctor names each.

tests/doctor has the same ten faults without a lab, some of them by simulated answers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.lab.desk import Desk
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab

# A kernel without flock: a filter for this process and its children, as in a container's seccomp profile.
WITHOUT_FLOCK = """
import ctypes, os, struct, sys

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

NUMBER, FLOCK, ENOSYS, ALLOWED = 0, {"x86_64": 73, "aarch64": 32}[os.uname().machine], 38, 0x7FFF0000
code = b"".join(struct.pack("HBBI", *line) for line in (
    (0x20, 0, 0, NUMBER), (0x15, 0, 1, FLOCK), (0x06, 0, 0, 0x00050000 | ENOSYS), (0x06, 0, 0, ALLOWED)))
buffer = ctypes.create_string_buffer(code, len(code))
program = Program(4, ctypes.addressof(buffer))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture
def desk(lab_slurm: SlurmLab, request: pytest.FixtureRequest) -> Desk:
    folder = lab_slurm.shared / request.node.name
    folder.mkdir()
    return Desk(lab_slurm, folder)


def findings(text: str, level: str) -> list[dict[str, Any]]:
    return [finding for finding in json.loads(text)["findings"] if finding["level"] == level]


def test_full_scratch_and_shared_memory(desk: Desk) -> None:
    """The doctor finds a full /tmp, played by a tmpfs of a megabyte, and a /dev/shm that is filled by a file."""
    words = ("doctor", "--only", "scratch", "--only", "shared-memory", "--json")
    sound = desk.hpcdl(*words, host="node4")
    assert sound.code == 0 and not findings(sound.out, "failure"), sound.out
    plant = "mkdir /tmp/full && mount -t tmpfs -o size=1m tmpfs /tmp/full && fallocate -l 1000M /dev/shm/left-behind"
    assert desk.lab.run(["sh", "-c", plant], host="node4").code == 0
    try:
        full = Desk(desk.lab, desk.folder, {"TMPDIR": "/tmp/full"}).hpcdl(*words, host="node4")
    finally:
        desk.lab.run(["sh", "-c", "rm /dev/shm/left-behind; umount /tmp/full; rmdir /tmp/full"], host="node4")
    assert full.code == 1
    scratch, memory = findings(full.out, "failure")
    assert scratch["check"] == "scratch" and "/tmp/full has 1 MiB free: it is full" in scratch["text"]
    assert memory["check"] == "shared-memory" and "24 MiB free" in memory["text"] and memory["remedy"]


def test_one_core_mask(desk: Desk) -> None:
    line = ["taskset", "-c", "0", *desk.line("doctor", "--only", "affinity", "--json")]
    finished = desk.lab.run(line, host="node4", env=desk.environment, cwd=desk.folder)
    (finding,) = findings(finished.out, "warning")
    assert finished.code == 0 and "would share one core" in finding["text"] and "taskset" in finding["remedy"]


def test_locks_that_the_kernel_refuses(desk: Desk) -> None:
    """The doctor finds that the kernel refuses locks, and h5py fails as the doctor says."""
    (desk.folder / "without_flock.py").write_text(WITHOUT_FLOCK)
    refuse = [desk.python, str(desk.folder / "without_flock.py")]
    line = [*refuse, *desk.line("doctor", "--only", "locking", "--json")]
    finished = desk.lab.run(line, env=desk.environment, cwd=desk.folder)
    assert finished.code == 1, finished.err
    (finding,) = findings(finished.out, "failure")
    assert "the file system refuses locks (Function not implemented)" in finding["text"]
    assert "HDF5_USE_FILE_LOCKING=FALSE" in finding["remedy"]
    write = [*refuse, desk.python, "-c", "import h5py; h5py.File('probe.h5', 'w')"]
    failing = desk.lab.run(write, env={"HDF5_USE_FILE_LOCKING": "TRUE"}, cwd=desk.folder)
    assert failing.code == 1 and "lock file" in failing.err, failing.err
    remedied = desk.lab.run(write, env={"HDF5_USE_FILE_LOCKING": "FALSE"}, cwd=desk.folder)
    assert remedied.code == 0, remedied.err
    reported = desk.lab.run(line, env={**desk.environment, "HDF5_USE_FILE_LOCKING": "FALSE"}, cwd=desk.folder)
    assert reported.code == 0, reported.out


def test_a_pmi_that_this_srun_has_not(desk: Desk) -> None:
    words = ("doctor", "--only", "scheduler", "--json")
    assert desk.hpcdl(*words).code == 0
    for named, reported in (("pmi1", "this srun knows"), ("none", "ranks may not be one job")):
        finished = Desk(desk.lab, desk.folder, {"HPCDL_SRUN_MPI": named}).hpcdl(*words)
        (finding,) = findings(finished.out, "failure")
        assert finished.code == 1 and reported in finding["text"] and finding["remedy"], finding


def test_a_clock_and_threads_in_a_job(desk: Desk) -> None:
    """The doctor finds a node of a job whose `date` is thirty seconds ahead, and a setting of 64 threads per rank."""
    (desk.folder / "date").write_text('#!/bin/sh\nexec /usr/bin/env -i /bin/.date -d "+30 seconds" "$@"\n')
    (desk.folder / "date").chmod(0o755)
    real = Path("/bin/date").resolve()
    plant = (
        f"cp -p {real} /tmp/real-date && sed -i s,/bin/.date,/tmp/real-date, {desk.folder}/date "
        f"&& mount --bind {desk.folder}/date {real}"
    )
    words = ("--nodes", "3", "--ranks-per-node", "2", "--time", "5m", "--name", "look", "--")
    checks = ("doctor", "--only", "clocks", "--only", "threads")
    forced = Desk(desk.lab, desk.folder, {"OMP_NUM_THREADS": "64"})
    assert desk.lab.run(["sh", "-c", plant], host="node3").code == 0
    try:
        finished = forced.hpcdl("submit", *words, *checks)
        assert finished.code == 0, finished.err
        number = int(finished.out)
        job = desk.lab.wait_for_job(number, timeout_s=300)
    finally:
        desk.lab.run(["sh", "-c", f"umount {real}; rm /tmp/real-date"], host="node3")
    text = desk.log(number)
    assert job["JobState"] == "FAILED" and job["ExitCode"] == "1:0", text
    ahead = r"^FAILURE  clocks +the clock of node3 is ahead by (2\d|30)(\.\d+)? s or more"
    assert re.search(ahead, text, re.MULTILINE), text
    assert re.search(r"^warning  threads +OMP_NUM_THREADS=64 x 2 ranks on a node = 128 threads", text, re.MULTILINE)
