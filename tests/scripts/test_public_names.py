"""No public name of the package is hidden by a subpackage of the same name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOMS = """
import importlib, pkgutil, types
import hpcdl
for room in pkgutil.iter_modules(hpcdl.__path__):
    if room.name != "__main__":
        importlib.import_module(f"hpcdl.{room.name}")
import hpcdl.rank.job
hidden = [name for name in hpcdl.__all__ if name != "data" and isinstance(getattr(hpcdl, name), types.ModuleType)]
hpcdl.init()
print(hidden, hpcdl.rank(), hpcdl.size())
"""


@pytest.mark.long
def test_public_names_are_what_they_say_after_every_room_was_imported(tmp_path: Path) -> None:
    (tmp_path / "rooms.py").write_text(ROOMS)
    finished = subprocess.run([sys.executable, "rooms.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == "[] 0 1"
