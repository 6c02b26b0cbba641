"""What every room's tests share: the command line in a subprocess, a data set, and the lab's skip-or-fail rule."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.lab.installed import Site
    from tests.lab.slurm import SlurmLab

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "share" / "hpcdl" / "examples" / "digits"
LAB_REQUIRED = os.environ.get("CI") == "true" or os.environ.get("HPCDL_LAB") == "required"
"""Where this holds, a lab test whose packages are missing fails instead of being skipped."""
_FOREIGN = ("HPCDL_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "OMP_", "KMP_", "TF_", "XDG_")
"""Variables of the caller's own environment that would change what the command line does."""


@dataclass(frozen=True)
class Finished:
    """How a command ended: exit code and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """What the command printed on stdout, as one JSON document."""
        return json.loads(self.out)


class CommandLine:
    """The installed `hpcdl`, with settings and caches in a folder of its own: run(["models", "--json"])."""

    def __init__(self, home: Path) -> None:
        self.home = home
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.environment = kept | {
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "HPCDL_SITE_CONFIG": str(home / "site.toml"),
        }

    def __call__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120.0,
    ) -> Finished:
        """Run `hpcdl ARGUMENTS`; `env` comes on top of the cleaned environment. A time-out fails the test."""
        finished = subprocess.run(
            [sys.executable, "-m", "hpcdl", *map(str, arguments)],
            cwd=cwd or self.home,
            env=self.environment | dict(env or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        return Finished(finished.returncode, finished.stdout, finished.stderr)


@pytest.fixture
def run_hpcdl(tmp_path: Path) -> CommandLine:
    """The command line with a home of this test's own."""
    home = tmp_path / "home"
    home.mkdir()
    return CommandLine(home)


@pytest.fixture(scope="session")
def session_hpcdl(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """The command line with one home for the session: for fixtures that many tests share."""
    return CommandLine(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="session")
def shards(session_hpcdl: CommandLine) -> Path:
    """The digits as 28x28 shards, four fifths train and one fifth val, made once. Read only."""
    folder = session_hpcdl.home / "shards"
    finished = session_hpcdl(["shard", DIGITS, folder, "--image-size", "28", "--split", "train=0.8,val=0.2"])
    assert finished.code == 0, finished.err
    return folder


@pytest.fixture(scope="session")
def need() -> Callable[..., None]:
    """need(condition, "what is missing"): skip where the lab is optional, fail where it is required."""

    def demand(available: bool, missing: str) -> None:
        if available:
            return
        if LAB_REQUIRED:
            pytest.fail(f"the lab is required here, but {missing}", pytrace=False)
        pytest.skip(missing)

    return demand


@pytest.fixture(scope="session")
def lab_slurm(need: Callable[..., None]) -> Iterator[SlurmLab]:
    """A Slurm cluster of four nodes: lab_slurm.run(["sinfo"], user="student"). Tests leave its queue empty."""
    from tests.lab import hosts, slurm

    for missing in (hosts.missing(), slurm.missing()):
        need(not missing, missing)
    with hosts.lab_folder() as folder:
        lab = slurm.SlurmLab(folder, num_nodes=4)
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()


@pytest.fixture(scope="session")
def site(lab_slurm: SlurmLab, need: Callable[..., None]) -> Site:
    """hpcdl as a centre has it, on the lab's shared file system: one version for each kind of MPI. Read only."""
    from tests.lab import installed

    missing = installed.missing()
    need(not missing, missing)
    return installed.install_site(lab_slurm.shared)


@pytest.fixture(autouse=True, scope="session")
def _own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep code under test in this process away from the settings and caches of whoever runs the tests."""
    home = tmp_path_factory.mktemp("settings")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(_FOREIGN) and name != "HPCDL_LAB"]:
            patch.delenv(name)
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.setenv("HPCDL_SITE_CONFIG", str(home / "site.toml"))
        yield
