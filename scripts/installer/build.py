"""Build PREFIX/<version>, remove it, or fill a wheelhouse."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

from kept import RECEIPT, SCRATCH, write_list
from modulefile import say_default, warn_of_default, write_modulefile
from plan import CHECKOUT, FullDisk, InstallError, Plan
from processes import ignore_stops
from tree import (
    check_replaceable,
    discard,
    is_ours,
    recover,
    refuse_foreign,
    refuse_links,
    refuse_when_used,
    replacing,
    sweep_left,
)

from hpcdl.core.errors import NO_PLACE
from hpcdl.core.storage.disk import create, creating, make_folder, make_link, make_private_folder, private_folder

_PR_SET_PDEATHSIG = 1
_PIP_UNITS = {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
PIP_LOG = "pip.log"
"""In the scratch folder, and removed with it."""
NEWS_S = 15.0
"""Seconds between progress messages of a long step."""
SOURCES = ("hpcdl", "pyproject.toml", "setup.py", "README.md", "LICENSE")
"""Sources of the package, which are copied first: the checkout may be read-only and stays unchanged."""


def install(plan: Plan) -> None:
    """Build the tree at its final path under a marker, then write the modulefile; remove all of it on failure."""
    plan.check_writable()
    plan.check_wheelhouse()
    library = plan.find_mpi_library()
    refuse_links(plan)
    refuse_foreign(plan)
    recover(plan)
    check_replaceable(plan)
    print(f"hpcdl: installing {plan.version} into {plan.tree} (MPI: {library or 'mpich, inside the tree'})", flush=True)
    for sentence in (*plan.unreachable(), *plan.unloaded()):
        print(f"hpcdl: warning: {sentence}", file=sys.stderr)
    started = time.monotonic()
    with replacing(plan):
        fetched = fill(plan)
        write_list(plan)
        write_modulefile(plan)
    seconds, (num_files, num_bytes) = time.monotonic() - started, size_of(plan.tree)
    network = f"{fetched / 1e6:,.0f} MB were fetched from package indexes"
    print(f"hpcdl: installed in {seconds:.0f} s: {num_bytes / 1e9:.1f} GB in {num_files:,} files; {network}")
    print(f"hpcdl: next: module use {plan.moduledir}; module load hpcdl")
    say_default(plan)


def uninstall(plan: Plan) -> None:
    """Remove the modulefile, then the tree; refuse a folder that is no hpcdl tree, a link, and a tree in use."""
    refuse_links(plan)
    if not plan.tree.exists():
        raise InstallError(f"hpcdl {plan.version} is not in {plan.prefix}; name PREFIX and VERSION as installed")
    plan.check_writable()
    if not is_ours(plan.tree):
        raise InstallError(f"{plan.tree} was not made by `make install`; remove it by hand if you mean it")
    refuse_when_used(plan.tree)
    ignore_stops()
    discard(plan)
    sweep_left(plan)
    print(f"hpcdl: removed hpcdl {plan.version} from {plan.prefix}")
    warn_of_default(plan)


def wheelhouse(plan: Plan) -> None:
    """Collect every wheel that `make install` needs, for either MPI, into WHEELHOUSE (default: wheelhouse)."""
    folder = plan.wheelhouse or CHECKOUT / "wheelhouse"
    with private_folder("hpcdl-wheelhouse-") as work:
        copy_sources(work / "source")
        run([sys.executable, "-m", "venv", str(work / "venv")], "making a virtual environment")
        wanted = [f"{work / 'source'}[mpich,compression,docs]", "setuptools>=77", *plan.requirements]
        line = [
            str(work / "venv/bin/python"),
            "-m",
            "pip",
            "wheel",
            "-qq",
            "--wheel-dir",
            str(work / "wheels"),
            *wanted,
        ]
        run(line, "collecting wheels")
        # each install builds hpcdl itself from the checkout
        wheels = [wheel for wheel in (work / "wheels").glob("*.whl") if not wheel.name.startswith("hpcdl-")]
        add_wheels(wheels, folder)
    total = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"hpcdl: {folder} holds {len(list(folder.glob('*.whl')))} wheels, {total / 1e6:.0f} MB")


def add_wheels(wheels: list[Path], folder: Path) -> None:
    """Copy the wheels that `folder` lacks; existing ones stay, whatever their origin."""
    make_folder(folder)
    new = [wheel for wheel in wheels if not os.path.lexists(folder / wheel.name)]
    if folder == CHECKOUT / "wheelhouse":  # `make clean` removes the names listed there
        notes = folder / ".hpcdl-made"
        noted = {*notes.read_text().split("\n")} if notes.is_file() else set()
        with creating(notes) as file:
            file.write(
                "".join(f"{name}\n" for name in sorted({*noted, *(wheel.name for wheel in new)} - {""})).encode()
            )
    for wheel in new:
        with wheel.open("rb") as source, creating(folder / wheel.name, durable=False) as file:
            shutil.copyfileobj(source, file)


def fill(plan: Plan) -> int:
    """Write virtual environment, package, share, manual, completions, receipt; then make them readable for all users.

    Returns the number of bytes downloaded from package indexes.
    """
    tree = plan.tree
    made = make_private_folder(SCRATCH, tree)
    scratch = made.path
    copy_sources(scratch / "source")
    run([sys.executable, "-m", "venv", str(tree / "venv")], "making the virtual environment")
    python = tree / "venv" / "bin" / "python"
    environment = pip_environment(plan, scratch)
    copy_pages(tree / "share" / "hpcdl" / "docs")
    build_pages(plan, scratch, environment)
    wanted = [f"{scratch / 'source'}[{plan.extras}]", *plan.requirements]
    line = [str(python), "-m", "pip", "install", "-qq", *pip_options(plan, scratch), *wanted]
    run(line, "pip install", environment, growing=tree)
    shutil.copytree(CHECKOUT / "share" / "hpcdl", tree / "share" / "hpcdl", dirs_exist_ok=True)
    (tree / "venv" / "share").mkdir(exist_ok=True)
    make_link(tree / "venv" / "share" / "hpcdl", "../../share/hpcdl")
    write_programs(tree, own_mpi=plan.mpi == "mpich")
    run(
        [str(python), str(CHECKOUT / "scripts" / "make_manual.py"), str(tree / "share")],
        "writing the manual",
        environment,
    )
    check_mpi(plan, python, environment)
    frozen = subprocess.run(
        [python, "-m", "pip", "freeze", "--all"], capture_output=True, text=True, env=environment, check=True
    )
    receipt = {
        "version": plan.version,
        "mpi": plan.mpi,
        "mpi_module": plan.mpi_module,
        "mpi_library": plan.mpi_library,
        "python": sys.version.split()[0],
        "modulefile": str(plan.modulefile),
        "packages": [line for line in frozen.stdout.split("\n") if line and " @ " not in line],
    }
    create(tree / RECEIPT, f"{json.dumps(receipt, indent=1)}\n".encode())
    fetched = fetched_bytes(scratch / PIP_LOG)
    made.remove()
    open_to_everybody(tree)
    return fetched


def copy_pages(folder: Path) -> None:
    """Copy the documentation for `hpcdl docs`."""
    left_out = shutil.ignore_patterns("study", "conf.py", "__pycache__")
    if (CHECKOUT / "docs").is_dir():
        shutil.copytree(CHECKOUT / "docs", folder, ignore=left_out)


def build_pages(plan: Plan, scratch: Path, environment: Mapping[str, str]) -> None:
    """Build the same pages of this checkout as a searchable site in docs/html, independently of `make docs`.

    If an old wheelhouse lacks the wheels for that, print one line and leave the pages as text.
    """
    if not (CHECKOUT / "docs" / "conf.py").is_file():
        return
    python = scratch / "pages" / "bin" / "python"
    run([sys.executable, "-m", "venv", str(python.parents[1])], "making an environment for the pages")
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    wanted = project["optional-dependencies"]["docs"]
    line = [str(python), "-m", "pip", "install", "-qq", *pip_options(plan, scratch), *wanted]
    try:
        run(line, "fetching Sphinx for the pages", environment)
    except FullDisk:
        raise
    except InstallError:
        print(
            "hpcdl: warning: no Sphinx to be had: the pages are installed as text; `make wheelhouse` adds it",
            file=sys.stderr,
        )
        return
    target, work = plan.tree / "share" / "hpcdl" / "docs" / "html", scratch / "doctrees"
    line = [str(python), "-B", "-m", "sphinx", "-q", "-b", "html", "-d", str(work), str(CHECKOUT / "docs"), str(target)]
    run(line, "building the pages", environment)


def write_programs(tree: Path, *, own_mpi: bool) -> None:
    """Fill bin/ with what the module puts on PATH: hpcdl, the Python that can import it, and its own MPI's mpiexec.

    pip and python3 are not included, so that a user's other programs find their own.
    """
    programs = tree / "bin"
    programs.mkdir()
    make_link(programs / "hpcdl", "../venv/bin/hpcdl")
    for name, program in (
        ("hpcdl-python", "python"),
        ("python", "python"),
        *([("mpiexec", "mpiexec")] if own_mpi else []),
    ):
        wrapper = f"#!/bin/sh\n# {program} of hpcdl's environment\nexec '{tree}/venv/bin/{program}' \"$@\"\n"
        create(programs / name, wrapper.encode(), mode=0o755)


def check_mpi(plan: Plan, python: Path, environment: Mapping[str, str]) -> None:
    """Raise InstallError if mpi4py cannot load the MPI of this tree."""
    own = {"MPI4PY_LIBMPI": plan.mpi_library} if plan.mpi_library else {}
    line = [str(python), "-c", "from mpi4py import MPI; print(MPI.Get_library_version().split(chr(10))[0])"]
    run(line, "loading MPI", {**environment, **own})


def pip_options(plan: Plan, scratch: Path) -> list[str]:
    """Return pip's options: where it finds wheels, no cache in a home folder, and its log file."""
    own = ["--no-cache-dir", "--log", str(scratch / PIP_LOG)]
    if plan.wheelhouse is None:
        return own
    return [*own, "--no-index", "--find-links", str(plan.wheelhouse)]


def pip_environment(plan: Plan, scratch: Path) -> dict[str, str]:
    """Return the environment for pip and for checks: temporary files within the tree, no foreign Python settings.

    PYTHONSAFEPATH keeps the checkout, where make runs, out of the installed Python's imports.

    With a wheelhouse, pip settings of the user and the machine are ignored, so that no index is asked.
    """
    dropped = (
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONSTARTUP",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_USER",
        "PIP_REQUIRE_VIRTUALENV",
    )
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    if plan.wheelhouse is not None:
        environment = {name: value for name, value in environment.items() if not name.startswith("PIP_")}
        environment["PIP_CONFIG_FILE"] = os.devnull
    temporary = scratch / "tmp"
    temporary.mkdir(exist_ok=True)
    return environment | {
        "TMPDIR": str(temporary),
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def copy_sources(folder: Path) -> None:
    """Copy the package's sources into `folder`."""
    folder.mkdir(parents=True)
    for name in SOURCES:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def open_to_everybody(tree: Path) -> None:
    """Let all users read files, enter folders and run programs, whatever the modes of wheels and the umask."""
    for folder, _, files in os.walk(tree):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            mode = path.lstat().st_mode
            if not path.is_symlink():
                executable = 0o111 if mode & 0o100 else 0
                path.chmod((mode | 0o444 | executable) & 0o7777)


def size_of(tree: Path) -> tuple[int, int]:
    """Return the number of files below `tree`, and their bytes, without files removed during the count."""
    num_files = num_bytes = 0
    for folder, _, files in os.walk(tree):
        for name in files:
            with contextlib.suppress(OSError):
                num_bytes += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118  tens of thousands of files
                num_files += 1
    return num_files, num_bytes


def fetched_bytes(log: Path) -> int:
    """Return the bytes that pip downloaded, from sizes in its log: `Downloading NAME.whl (644.8 MB)`."""
    found = re.findall(r"Downloading \S+ \(([\d.]+) (bytes|[kMG]B)\)", log.read_text() if log.is_file() else "")
    return round(sum(float(number) * _PIP_UNITS[unit] for number, unit in found))


def run(
    line: list[str], what: str, environment: Mapping[str, str] | None = None, *, growing: Path | None = None
) -> None:
    """Run a step, which ends if this process is killed; its output is shown only if it fails.

    One line says what the step does; further lines give the elapsed time and the size of the folder `growing`.
    """
    print(f"hpcdl: {what} ...", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            line, env=environment, stdout=output, stderr=subprocess.STDOUT, preexec_fn=_end_with_parent()
        )
        try:
            while _runs_on(process):
                size = f", {size_of(growing)[1] / 1e6:,.0f} MB so far" if growing else ""
                print(f"hpcdl: {what}: {time.monotonic() - started:.0f} s{size}", flush=True)
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        if process.returncode:
            said = output.read().decode(errors="replace")
            for number, remedy in NO_PLACE.items():  # pip tells of it by a traceback for each line of its log
                if (why := os.strerror(number)) in said:
                    raise FullDisk(f"{what} failed: {why}; {remedy}; nothing was left behind", exit_code=1)
            sys.stderr.write(said)
            raise InstallError(f"{what} failed (see above); nothing was left behind", exit_code=1)


def _runs_on(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process still runs after NEWS_S."""
    try:
        process.wait(NEWS_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _end_with_parent() -> Callable[[], None]:
    """Return a hook for a child to call before its program: it dies with its parent (prctl(2), PR_SET_PDEATHSIG)."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
