"""An environment is packed once, unpacked on each node, and removed afterwards."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.cluster import own_env
from hpcdl.cluster.launchers import load_launcher
from hpcdl.cluster.launchers.mpiexec import find_mpiexec, launch_flags
from hpcdl.cluster.processes import NodesFailed
from hpcdl.comm.mpi import spread
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.paths import own_program


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment with one module, which stands for this process's environment."""
    prefix = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True, timeout=300)
    packages = next(prefix.glob("lib/python*/site-packages"))
    (packages / "only_here.py").write_text("WORD = 'staged'\n")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    (tmp_path / "node").mkdir()
    return prefix


def test_ranks_run_from_the_copy_and_it_goes_away(small: Path, tmp_path: Path) -> None:
    with own_env.staged(load_launcher("local"), 1, os.environ) as python:
        folder = Path(python).parents[1]
        assert folder.parent == tmp_path / "node" and stat.S_IMODE(folder.stat().st_mode) == 0o700
        code = "import only_here, sys; print(only_here.WORD, only_here.__file__.startswith(sys.prefix), sys.prefix)"
        out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
        assert out.split() == ["staged", "True", str(folder)]
    assert list((tmp_path / "node").iterdir()) == []


def test_it_is_packed_once_and_again_after_a_change(small: Path) -> None:
    first = own_env.pack(small)
    stamp = first.stat().st_mtime_ns
    assert own_env.pack(small) == first and first.stat().st_mtime_ns == stamp
    (next(small.glob("lib/python*/site-packages")) / "more-1.0.dist-info").mkdir()
    second = own_env.pack(small)
    assert second != first and not first.exists()


def test_a_place_that_is_taken_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    own_env.node_folder(os.environ).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HpcdlError, match="--stage-env"), own_env.staged(load_launcher("local"), 1, os.environ):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_only_a_virtual_environment_can_be_staged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a virtual environment"):
        own_env.pack(tmp_path)


def on_ranks(file: Path, *command: str, told: int = 3) -> subprocess.CompletedProcess[str]:
    """Run comm/mpi/spread on three ranks, which expect `told` ranks."""
    mpiexec = find_mpiexec()
    program = own_program("hpcdl.comm.mpi.spread", str(file), str(told), *command)
    line = [str(mpiexec.path), *launch_flags(mpiexec.flavour), "-n", "3", *program]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.mpi
def test_one_rank_reads_and_all_have_it(tmp_path: Path) -> None:
    """One rank reads a file of over two blocks, readable only once; a rank that fails to take it blocks no other."""
    content = os.urandom(spread.BLOCK_BYTES * 2 + 12345)
    (tmp_path / "file").write_bytes(content)
    os.mkfifo(tmp_path / "once")
    feeder = subprocess.Popen(["cp", tmp_path / "file", tmp_path / "once"])
    done = on_ranks(tmp_path / "once", "sh", "-c", f"cat >{tmp_path}/at-$PMI_RANK")
    assert feeder.wait(timeout=60) == 0
    assert done.returncode == 0 and spread.STARTED == own_env.SPREADING and spread.STARTED in done.stdout, done.stderr
    assert [(tmp_path / f"at-{rank}").read_bytes() == content for rank in range(3)] == [True] * 3
    refusing = (
        f"test $PMI_RANK != 1 || {{ echo 'hpcdl: node one: no room' >&2; exit 7; }}; cat >{tmp_path}/at-$PMI_RANK"
    )
    done = on_ranks(tmp_path / "file", "sh", "-c", refusing)
    assert done.returncode != 0 and done.stderr.count("hpcdl: node one: no room") == 1
    assert (tmp_path / "at-2").read_bytes() == content
    done = on_ranks(tmp_path / "file", "cat", told=4)
    assert done.returncode != 0 and spread.STARTED not in done.stdout and "4 ranks were asked for" in done.stderr


@pytest.mark.parametrize("printed", ["", "spread: all ranks are there\n"])
def test_without_mpi_each_node_reads_for_itself(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], printed: str
) -> None:
    """Without MPI each node reads for itself; a failure before MPI starts blames no node, a later one is reported."""
    asked: list[list[str]] = []

    def play(launcher: object, num_nodes: int, command: list[str], *_: object, mpi: bool, **__: object) -> None:
        asked.append([*map(str, command), f"mpi={mpi}"])
        if mpi:
            raise NodesFailed("--stage-env: node n2: no room", printed)

    monkeypatch.setattr(own_env, "on_every_node", play)
    if printed:
        with pytest.raises(NodesFailed, match="no room"), own_env.staged(load_launcher("local"), 4, os.environ):
            pass
    else:
        with own_env.staged(load_launcher("local"), 4, os.environ):
            assert asked[-1][3] == "unpack" and asked[-1][5].endswith(".tar")
    assert ("reads" in capsys.readouterr().err) == (not printed)
    assert "hpcdl.comm.mpi.spread" in asked[0] and asked[-1][3] == "remove"
