"""Checkouts and `make install` for tests: any version, any user, any environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import ROOT, Finished

PARTS = ("hpcdl", "scripts", "etc", "share", "Makefile", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@dataclass(frozen=True)
class Checkout:
    """A copy of the files that `make install` reads."""

    folder: Path

    @property
    def version(self) -> str:
        """Return the version that this checkout installs."""
        found = re.search(r'__version__ = "(.+)"', (self.folder / "hpcdl" / "__init__.py").read_text())
        assert found
        return found[1]

    def make(
        self,
        target: str,
        *settings: str,
        env: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        timeout_s: float = 900.0,
    ) -> Finished:
        """Run `make TARGET SETTINGS...`, prefixed with the words of `before` (another user, another umask)."""
        line = [*before, "make", "--no-print-directory", target, *settings]
        finished = subprocess.run(
            line,
            cwd=self.folder,
            env=clean_environment(self.folder) | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return Finished(finished.returncode, finished.stdout, finished.stderr)


def copy_checkout(folder: Path, version: str) -> Checkout:
    """Copy this checkout to `folder`, with version `version`."""
    folder.mkdir(parents=True)
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*_cache")
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=unwanted)
        else:
            shutil.copy(source, folder / name)
    package = folder / "hpcdl" / "__init__.py"
    package.write_text(re.sub(r'__version__ = ".+"', f'__version__ = "{version}"', package.read_text()))
    return Checkout(folder)


def clean_environment(home: Path) -> dict[str, str]:
    """Return the caller's environment without make's variables and without a virtual environment."""
    dropped = ("MAKE", "MFLAGS", "PREFIX", "VERSION", "FORCE", "MPI", "VIRTUAL_ENV", "PYTHON", "HPCDL_", "PYENV_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return kept | {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(home)}


def files_below(folder: Path) -> dict[str, int]:
    """Return every path below `folder` with its modification time, to show that a command changed nothing."""
    return {str(path.relative_to(folder)): path.lstat().st_mtime_ns for path in folder.rglob("*")}
