"""Two real users, one who plants links and one who runs hpcdl, and checks that nothing of theirs changed."""

from __future__ import annotations

import json
import os
import pwd
import select
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.conftest import ROOT, CommandLine, Finished, end_family, patience, told

ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
PLANTER = "nobody"
"""The owner of the links."""
_CLOSED = next((folder for folder in (ROOT, *ROOT.parents) if not folder.stat().st_mode & stat.S_IXOTH), None)
"""A folder that keeps other users from this checkout, such as one of `mktemp -d`."""
_UNREACHED = pytest.mark.skipif(
    _CLOSED is not None and os.environ.get("HPCDL_LAB") != "required",
    reason=f"other users cannot enter {_CLOSED}, and so not run this checkout",
)
CALLERS = ("root", pytest.param("daemon", marks=_UNREACHED))
"""Users who run hpcdl: support staff looking at a user's run, and a user looking at another's."""
Facts = dict[str, tuple[object, ...]]


class Caller:
    """The command line of one user, in one process of that user: caller(["runs"], cwd=folder)."""

    def __init__(self, name: str, home: Path, environment: Mapping[str, str]) -> None:
        self.name, self.home = name, home
        user = pwd.getpwnam(name)
        give(home, name)
        line = [sys.executable, "-m", "tests.security.shell"]
        if user.pw_uid != os.geteuid():
            line = ["setpriv", "--reuid", name, "--regid", str(user.pw_gid), "--clear-groups", "--", *line]
        own = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "XDG_CACHE_HOME": str(home / "cache")}
        own["HPCDL_SITE_CONFIG"] = str(home / "site.toml")
        self._process = subprocess.Popen(
            line,
            cwd=home,
            env={**environment, **own, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, arguments: list[str], cwd: Path) -> Finished:
        """Run `hpcdl ARGUMENTS`."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps([arguments, str(cwd)]) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], patience(60))[0]:
            end_family(process.pid)
            pytest.fail(f"hpcdl {' '.join(arguments)} does not end", pytrace=False)
        finished = Finished(*json.loads(process.stdout.readline()))
        print(told(f"{self.name}: hpcdl " + " ".join(arguments), finished))
        return finished

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def environment_of(hpcdl: CommandLine, programs: Path) -> dict[str, str]:
    """Return the cleaned environment, with a fake batch system first on PATH."""
    return hpcdl.environment | {"PATH": f"{programs}:{os.environ['PATH']}"}


def give(path: Path, name: str) -> None:
    """Give `path` and everything below it to that user; of a link, the link itself, not its target."""
    user = pwd.getpwnam(name)
    for item in (path, *([] if path.is_symlink() else path.rglob("*"))):
        if item.is_symlink() or item.lstat().st_nlink < 2 or item.is_dir():  # a hard link is another user's file
            os.lchown(item, user.pw_uid, user.pw_gid)


def facts_below(folder: Path, but: tuple[str, ...] = ()) -> Facts:
    """Return kind, owner, times and content of `folder` and everything below it, without the names in `but`."""
    found: Facts = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        name = str(path.relative_to(folder))
        if name in but or any(name.startswith(f"{left}/") for left in but):
            continue
        status = path.lstat()
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = path.readlink()
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        found[name] = (stat.filemode(status.st_mode), status.st_uid, status.st_ino, status.st_mtime_ns, content)
    return found


def refused(finished: Finished, codes: tuple[int, ...] = (2,)) -> bool:
    """Return whether it ended with one of these codes and one line, apart from remarks; never with a traceback."""
    lines = [line for line in finished.err.splitlines() if line.startswith("hpcdl: ")]
    return finished.code in codes and len(lines) == 1
