"""Build PREFIX/<version>, remove it, or fill a wheelhouse."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from kept import RECEIPT, SCRATCH, write_list
from modulefile import write_modulefile
from plan import CHECKOUT, InstallError, Plan
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

from hpcdl.core.disk import create, creating, make_folder, make_link, make_private_folder, private_folder

_PR_SET_PDEATHSIG = 1
SOURCES = ("hpcdl", "pyproject.toml", "setup.py", "README.md", "LICENSE")
"""What the package is built from, in a copy: the checkout may be read-only and stays as it is."""


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
    for sentence in plan.unreachable():
        print(f"hpcdl: warning: {sentence}", file=sys.stderr)
    started = time.monotonic()
    with replacing(plan):
        fill(plan)
        write_list(plan)
        write_modulefile(plan)
    print(f"hpcdl: installed in {time.monotonic() - started:.0f} s; `module use {plan.moduledir}; module load hpcdl`")


def uninstall(plan: Plan) -> None:
    """Remove the modulefile, then the tree; refuse what is no hpcdl tree, a link, and what is in use."""
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


def wheelhouse(plan: Plan) -> None:
    """Collect every wheel that `make install` needs, for either MPI, into WHEELHOUSE (default: wheelhouse)."""
    folder = plan.wheelhouse or CHECKOUT / "wheelhouse"
    with private_folder("hpcdl-wheelhouse-") as work:
        copy_sources(work / "source")
        run([sys.executable, "-m", "venv", str(work / "venv")], "making a virtual environment")
        wanted = [f"{work / 'source'}[mpich,compression]", "setuptools>=77", *plan.requirements]
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
        # hpcdl itself is built from the checkout at each install.
        wheels = [wheel for wheel in (work / "wheels").glob("*.whl") if not wheel.name.startswith("hpcdl-")]
        add_wheels(wheels, folder)
    total = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"hpcdl: {folder} holds {len(list(folder.glob('*.whl')))} wheels, {total / 1e6:.0f} MB")


def add_wheels(wheels: list[Path], folder: Path) -> None:
    """Copy what `folder` does not have yet: a wheel that is there stays, whoever put it there."""
    make_folder(folder)
    new = [wheel for wheel in wheels if not os.path.lexists(folder / wheel.name)]
    if folder == CHECKOUT / "wheelhouse":  # `make clean` removes what is noted there
        notes = folder / ".hpcdl-made"
        noted = {*notes.read_text().split("\n")} if notes.is_file() else set()
        with creating(notes) as file:
            file.write(
                "".join(f"{name}\n" for name in sorted({*noted, *(wheel.name for wheel in new)} - {""})).encode()
            )
    for wheel in new:
        with wheel.open("rb") as source, creating(folder / wheel.name, durable=False) as file:
            shutil.copyfileobj(source, file)


def fill(plan: Plan) -> None:
    """Virtual environment, package, share, manual, completions, receipt; then open it to everybody."""
    tree = plan.tree
    made = make_private_folder(SCRATCH, tree)
    scratch = made.path
    copy_sources(scratch / "source")
    run([sys.executable, "-m", "venv", str(tree / "venv")], "making the virtual environment")
    python = tree / "venv" / "bin" / "python"
    environment = pip_environment(plan, scratch)
    wanted = [f"{scratch / 'source'}[{plan.extras}]", *plan.requirements]
    run([str(python), "-m", "pip", "install", "-qq", *pip_options(plan), *wanted], "pip install", environment)
    shutil.copytree(CHECKOUT / "share" / "hpcdl", tree / "share" / "hpcdl")
    copy_pages(tree / "share" / "hpcdl" / "docs")
    (tree / "venv" / "share").mkdir(exist_ok=True)
    make_link(tree / "venv" / "share" / "hpcdl", "../../share/hpcdl")
    write_programs(tree)
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
    made.remove()
    open_to_everybody(tree)


def copy_pages(folder: Path) -> None:
    """The documentation for `hpcdl docs`, with the site that `make docs` built where it did."""
    left_out = shutil.ignore_patterns("study", "conf.py", "__pycache__")
    if (CHECKOUT / "docs").is_dir():
        shutil.copytree(CHECKOUT / "docs", folder, ignore=left_out)
        if (CHECKOUT / "build" / "site").is_dir():
            shutil.copytree(CHECKOUT / "build" / "site", folder / "html")


def write_programs(tree: Path) -> None:
    """bin/ holds what the module puts on PATH: hpcdl, and the Python that can import it; never pip or mpiexec."""
    programs = tree / "bin"
    programs.mkdir()
    make_link(programs / "hpcdl", "../venv/bin/hpcdl")
    wrapper = f"#!/bin/sh\n# Python with hpcdl, Keras and TensorFlow\nexec '{tree}/venv/bin/python' \"$@\"\n"
    create(programs / "hpcdl-python", wrapper.encode(), mode=0o755)


def check_mpi(plan: Plan, python: Path, environment: Mapping[str, str]) -> None:
    """InstallError where mpi4py cannot load the MPI that this tree is for."""
    own = {"MPI4PY_LIBMPI": plan.mpi_library} if plan.mpi_library else {}
    line = [str(python), "-c", "from mpi4py import MPI; print(MPI.Get_library_version().split(chr(10))[0])"]
    run(line, "loading MPI", {**environment, **own})


def pip_options(plan: Plan) -> list[str]:
    """How pip finds wheels, and that it leaves no cache in anybody's home."""
    if plan.wheelhouse is None:
        return ["--no-cache-dir"]
    return ["--no-cache-dir", "--no-index", "--find-links", str(plan.wheelhouse)]


def pip_environment(plan: Plan, scratch: Path) -> dict[str, str]:
    """The environment for pip and for checks: temporary files within the tree, no foreign Python settings.

    PYTHONSAFEPATH keeps the checkout, where make runs, out of what the installed Python imports.

    With a wheelhouse the user's and the machine's pip settings do not count, so that no index is asked.
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
    """Copy what the package is built from into `folder`."""
    folder.mkdir(parents=True)
    for name in SOURCES:
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)


def open_to_everybody(tree: Path) -> None:
    """Give everybody the right to read, and to enter folders and run programs, whatever wheels and umask said."""
    for folder, _, files in os.walk(tree):
        for path in (Path(folder), *(Path(folder, name) for name in files)):
            mode = path.lstat().st_mode
            if not path.is_symlink():
                executable = 0o111 if mode & 0o100 else 0
                path.chmod((mode | 0o444 | executable) & 0o7777)


def run(line: list[str], what: str, environment: Mapping[str, str] | None = None) -> None:
    """Run a step, which ends when this process is killed; its output is shown only when it fails."""
    finished = subprocess.run(
        line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        preexec_fn=_end_with_parent(),
    )  # fmt: skip
    if finished.returncode:
        sys.stderr.write(finished.stdout)
        raise InstallError(f"{what} failed (see above); nothing was left behind", exit_code=1)


def _end_with_parent() -> Callable[[], None]:
    """What a child calls before its program starts: its parent's death kills it too (prctl(2), PR_SET_PDEATHSIG)."""
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
