from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.read.staging import staged
from tests.data.sharding import contents, make


@pytest.fixture
def data(tmp_path: Path) -> Path:
    make("synthetic:mnist", tmp_path / "data", samples=300, shards=2, split="train=0.8,val=0.2")
    (tmp_path / "local").mkdir()
    return tmp_path / "data"


def test_copies_are_read_and_removed(data: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    dataset = open_dataset(str(data))
    with staged(dataset, local) as near, staged(dataset, local) as other:  # two jobs on one node
        assert near.folder is not None and near.folder != other.folder
        assert near.folder.parent == local and near.folder.stat().st_mode & 0o777 == 0o700
        copied = {name: digest for name, digest in contents(near.folder).items() if name.endswith(".h5")}
        assert copied == {name: digest for name, digest in contents(data).items() if name.endswith(".h5")}
    assert not list(local.iterdir())
    with pytest.raises(RuntimeError), staged(dataset, local):
        raise RuntimeError("training failed")
    assert not list(local.iterdir())


def test_bad_places_full_places_and_bad_copies(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, dataset = tmp_path / "local", open_dataset(str(data))
    (tmp_path / "link").symlink_to(local)
    for base in (tmp_path / "link", tmp_path / "nothing", data / "manifest.json"):
        with pytest.raises(UsageError, match="cannot stage"), staged(dataset, base):
            pass
    real = os.statvfs(local)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 100, 10, 10, 9, 9, 9, 0, 255)))
    with pytest.raises(HpcdlError, match=r"KiB are needed, .* are free"), staged(dataset, local):
        pass
    monkeypatch.setattr(os, "statvfs", lambda _: real)
    shard = data / "train" / "shard-00001.h5"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptError, match=r"shard-00001\.h5: block"), staged(dataset, local):
        pass
    assert not list(local.iterdir())


HOLD = """
import sys, time
from pathlib import Path
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.read.staging import staged
with staged(open_dataset(sys.argv[1]), Path(sys.argv[2])) as near:
    print(near.folder, flush=True)
    time.sleep(60)
"""


def test_removed_on_sigterm_and_after_a_kill_by_the_next_job(data: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"

    def hold() -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-c", HOLD, data, local], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline().strip()
        return process

    for number, left in ((signal.SIGTERM, 0), (signal.SIGKILL, 1)):
        process = hold()
        process.send_signal(number)
        process.communicate(timeout=300)
        assert len(list(local.iterdir())) == left
    (local / f"hpcdl-{os.environ.get('USER', 'root')}-link").symlink_to(data)  # a trap: the link must not be followed
    with staged(open_dataset(str(data)), local):
        assert len([path for path in local.iterdir() if not path.is_symlink()]) == 1
    assert contents(data)


@pytest.mark.mpi
def test_ranks_of_a_node_share_one_copy_and_shard_together(data: Path, tmp_path: Path) -> None:
    from hpcdl.cluster.launchers.mpiexec import find_mpiexec

    code = (
        "import json, sys; from pathlib import Path; from hpcdl.comm.mpi.communicator import world;"
        "from hpcdl.data.format.dataset import open_dataset; from hpcdl.data.read.staging import staged\n"
        "group = world(2)\n"
        "with staged(open_dataset(sys.argv[1]), Path(sys.argv[2]), group) as near:\n"
        "    folders = group.allgather_json(str(near.folder)); there = len(list(Path(sys.argv[2]).iterdir()))\n"
        "if group.rank == 0: print(json.dumps([folders, there, len(list(Path(sys.argv[2]).iterdir()))]))"
    )
    mpiexec = [str(find_mpiexec().path), "-n", "2"]
    line = [*mpiexec, sys.executable, "-c", code, data, tmp_path / "local"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=True)
    folders, during, after = json.loads(done.stdout.strip().splitlines()[-1])
    assert folders[0] == folders[1] and (during, after) == (1, 0)
    make("synthetic:mnist", tmp_path / "alone", samples=300, shards=5)
    command = [sys.executable, "-m", "hpcdl", "shard", "synthetic:mnist", "--samples", "300", "--shards", "5"]
    subprocess.run([*mpiexec, *command, tmp_path / "together"], capture_output=True, timeout=300, check=True)
    assert contents(tmp_path / "together") == contents(tmp_path / "alone")
    done = subprocess.run(
        [*mpiexec, *command[:4], "/nothing", tmp_path / "new"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and done.stderr.count("no such source") == 1 and not (tmp_path / "new").exists()


def test_jobs_that_start_at_once_leave_each_other_alone(data: Path, tmp_path: Path) -> None:
    """Jobs that start together do not disturb each other, although a new folder may not be locked yet."""
    local, dataset, failed = tmp_path / "local", open_dataset(str(data)), []

    def job() -> None:
        for _ in range(6):
            try:
                with staged(dataset, local) as near:
                    assert near.folder is not None and (near.folder / "lock").exists()
            except (HpcdlError, OSError) as error:
                failed.append(error)

    jobs = [threading.Thread(target=job) for _ in range(5)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert not failed and not list(local.iterdir())
