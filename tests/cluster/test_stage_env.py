"""An environment is packed once, unpacked for itself, and gone afterwards."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.cluster import stage_env
from hpcdl.cluster.launchers import load_launcher
from hpcdl.core.errors import HpcdlError, UsageError


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A virtual environment with one module of its own, which counts as this process's."""
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
    with stage_env.staged(load_launcher("local"), 1, os.environ) as python:
        folder = Path(python).parents[1]
        assert folder.parent == tmp_path / "node" and stat.S_IMODE(folder.stat().st_mode) == 0o700
        code = "import only_here, sys; print(only_here.WORD, only_here.__file__.startswith(sys.prefix), sys.prefix)"
        out = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout
        assert out.split() == ["staged", "True", str(folder)]
    assert list((tmp_path / "node").iterdir()) == []


def test_it_is_packed_once_and_anew_after_a_change(small: Path) -> None:
    first = stage_env.pack(small)
    stamp = first.stat().st_mtime_ns
    assert stage_env.pack(small) == first and first.stat().st_mtime_ns == stamp
    (next(small.glob("lib/python*/site-packages")) / "more-1.0.dist-info").mkdir()
    second = stage_env.pack(small)
    assert second != first and not first.exists()


def test_a_place_that_is_taken_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    stage_env.node_folder(os.environ).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HpcdlError, match="--stage-env"), stage_env.staged(load_launcher("local"), 1, os.environ):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_only_a_virtual_environment_can_be_staged(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no virtual environment"):
        stage_env.pack(tmp_path)
