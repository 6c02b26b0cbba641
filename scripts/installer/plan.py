"""What to install and where: read from make's variables and checked before anything is written."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import NO_PLACE

CHECKOUT = Path(__file__).resolve().parents[2]
MPI_CHOICES = {"mpich": "PyPI's mpich, inside the tree", "site": "the centre's own MPI library"}


class InstallError(Exception):
    """A one-line error: what was given, what is possible, what to type. Exit code 2 before any write, else 1."""

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class FullDisk(InstallError):
    """A step found no place to write to: what else it lacks is not known."""


def told(error: OSError) -> str:
    """`cannot write FILE: WHY`, with the remedy where a place takes no more."""
    number, where, why = error.errno, error.filename, error.strerror
    if isinstance(error, shutil.Error):  # the copy of a folder: source, target and words of each file that failed
        _, where, words = error.args[0][0]
        found = re.match(r"\[Errno (\d+)\]", words)
        number = int(found[1]) if found else None
        why = os.strerror(number) if number else words
    remedy = f"; {NO_PLACE[number]}" if number in NO_PLACE else ""
    return (f"cannot write {where}: " if where else "") + (why or str(error)) + remedy


_OF_MAKE = ("SHELL", "MAKEFLAGS", "MAKE")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The variables of `make install`, resolved. `version` ends with SUFFIX; `tree` is PREFIX/<version>."""

    prefix: Path
    moduledir: Path
    mpi: str
    mpi_module: str
    mpi_library: str
    wheelhouse: Path | None
    requirements: tuple[str, ...]
    force: bool
    version: str
    loaded: tuple[str, ...]
    """The modules that the shell has loaded, as name/version; Lmod and Environment Modules list them."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Plan:
        """Return the plan described by make's variables; raises InstallError, which names the wrong variable."""
        _check_names(*(environment.get(name, "").split() for name in ("HPCDL_GIVEN", "HPCDL_SETTINGS")))
        mpi = environment.get("MPI") or "mpich"
        if mpi not in MPI_CHOICES:
            choices = " or ".join(f"MPI={name} ({text})" for name, text in MPI_CHOICES.items())
            raise InstallError(f"MPI={mpi} is unknown; possible: {choices}")
        mpi_module = _module_name(environment.get("MPI_MODULE") or "")
        for name in ("MPI_MODULE", "MPI_LIBRARY"):
            if environment.get(name) and mpi != "site":
                raise InstallError(f"{name}={environment[name]} is for MPI=site; add that, or leave {name} out")
        wheels, suffix = environment.get("WHEELHOUSE"), environment.get("SUFFIX") or ""
        _check_asked(environment.get("HPCDL_INSTALL") or "", suffix)
        return cls(
            prefix=_folder("PREFIX", environment.get("PREFIX") or "/opt/apps/hpcdl"),
            moduledir=_folder("MODULEDIR", environment.get("MODULEDIR") or "/opt/apps/modulefiles"),
            mpi=mpi,
            mpi_module=mpi_module,
            mpi_library=_quotable("MPI_LIBRARY", environment.get("MPI_LIBRARY") or ""),
            wheelhouse=_folder("WHEELHOUSE", wheels) if wheels else None,
            requirements=tuple(shlex.split(environment.get("REQUIREMENTS") or "")),
            force=(environment.get("FORCE") or "0") not in ("0", "no"),
            version=_version(environment.get("HPCDL_UNINSTALL") or checkout_version() + suffix),
            loaded=tuple(filter(None, (environment.get("LOADEDMODULES") or "").split(":"))),
        )

    @property
    def tree(self) -> Path:
        """The folder of this version."""
        return self.prefix / self.version

    @property
    def replaced(self) -> Path:
        """The path of the tree that FORCE=1 replaces, until the new one is complete."""
        return self.prefix / f".{self.version}.replaced"

    @property
    def begun(self) -> Path:
        """The path at which earlier versions began a tree; it may exist after a kill."""
        return self.prefix / f".{self.version}.begun"

    @property
    def modulefile(self) -> Path:
        """The modulefile of this version."""
        return self.moduledir / "hpcdl" / f"{self.version}.lua"

    @property
    def replaced_modulefile(self) -> Path:
        """The modulefile of the tree in `replaced`, under a name that Lmod ignores."""
        return self.modulefile.with_name(f".{self.modulefile.name}.replaced")

    @property
    def begun_modulefile(self) -> Path:
        """The path at which earlier versions wrote the modulefile before renaming it; it may exist after a kill."""
        return self.modulefile.with_name(f".{self.modulefile.name}.new")

    @property
    def extras(self) -> str:
        """The optional parts of the package in this plan."""
        return "mpich,compression" if self.mpi == "mpich" else "compression"

    def check_writable(self) -> None:
        """Raise InstallError if this user cannot write to PREFIX or MODULEDIR."""
        for name, folder in (("PREFIX", self.prefix), ("MODULEDIR", self.moduledir)):
            existing = folder
            while not existing.exists():
                existing = existing.parent
            if not existing.is_dir():
                raise InstallError(f"{name}={folder}: {existing} is not a folder; choose another {name}")
            if not os.access(existing, os.W_OK | os.X_OK):
                raise InstallError(
                    f"{name}={folder} cannot be written by this user ({existing} is not writable); "
                    f"choose another {name}, or ask whoever owns it"
                )

    def unloaded(self) -> list[str]:
        """Return a sentence if the shell has not loaded MPI_MODULE, without which `module load hpcdl` fails."""
        name = self.mpi_module
        if not name or any(module == name or module.startswith(f"{name}/") for module in self.loaded):
            return []
        return [
            f"MPI_MODULE={name} is not loaded in this shell; check that `module load {name}` works, because "
            "`module load hpcdl` will call it"
        ]

    def unreachable(self) -> list[str]:
        """Return a sentence for each place that other users should reach but cannot."""
        places = {"PREFIX": self.prefix, "MODULEDIR": self.moduledir, "PYTHON": Path(sys.executable).resolve()}
        found = []
        for name, path in places.items():
            closed = [folder for folder in path.parents if folder.is_dir() and not folder.stat().st_mode & 0o001]
            if closed:
                found.append(f"{name}={path} is out of reach for other users: they cannot enter {closed[-1]}")
        return found

    def check_wheelhouse(self) -> None:
        """Raise InstallError if WHEELHOUSE holds no wheels."""
        if self.wheelhouse is not None and not any(self.wheelhouse.glob("*.whl")):
            raise InstallError(f"WHEELHOUSE={self.wheelhouse} holds no wheels; `make wheelhouse` fills one")

    def find_mpi_library(self) -> str:
        """Return the site's MPI library, from MPI_LIBRARY or the dynamic linker; empty for the embedded one."""
        if self.mpi != "site":
            return ""
        candidates = [self.mpi_library] if self.mpi_library else ["libmpi.so", "libmpi.so.12", "libmpi.so.40"]
        for name in candidates:
            # In a separate process: a library loaded here could not be unloaded.
            probe = "import ctypes, os, sys; ctypes.CDLL(sys.argv[1], os.RTLD_LAZY).MPI_Get_version"
            if subprocess.run([sys.executable, "-c", probe, name], capture_output=True, check=False).returncode == 0:
                return name
        tried = f"MPI_LIBRARY={self.mpi_library} is none" if self.mpi_library else "none is on the library path"
        raise InstallError(
            f"MPI=site needs the site's MPI library, and {tried}; load the site's MPI module first, "
            "name the file with MPI_LIBRARY=/path/to/libmpi.so, or take MPI=mpich"
        )


def checkout_version() -> str:
    """Return the version of this checkout, read without importing it."""
    for node in ast.parse((CHECKOUT / "hpcdl" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__version__":
            return str(ast.literal_eval(node.value))
    raise InstallError("hpcdl/__init__.py has no __version__; take a whole checkout")


def _check_names(given: Sequence[str], known: Sequence[str]) -> None:
    """Refuse variables on make's command line that nothing reads, such as prefix= and DESTDIR=."""
    for name in sorted(set(given) - {*known, *_OF_MAKE}):
        near = f"did you mean {name.upper()}? " if name.upper() in known else ""
        raise InstallError(f"{name}= is unknown; {near}possible: {', '.join(known)}")


def _check_asked(asked: str, suffix: str) -> None:
    """Raise InstallError if `make install VERSION=...` names another version than this checkout's."""
    own = checkout_version()
    if asked in ("", own, own + suffix):
        return
    tag = f"v{asked.removesuffix(suffix)}"
    raise InstallError(
        f"VERSION={asked}: this checkout is version {own}; `git fetch --tags && git switch --detach {tag}` makes it "
        "that one if there is such a tag, or leave VERSION out"
    )


def _quotable(variable: str, text: str) -> str:
    if re.search(r"[:\"'\\$`\x00-\x1f]", text):
        raise InstallError(f"{variable}={text!r} cannot stand in PATH or a modulefile; leave out : \" ' \\ $ `")
    return text


def _folder(variable: str, text: str) -> Path:
    return Path(_quotable(variable, text)).expanduser().absolute()  # links are kept: paths of a centre often are links


def _module_name(text: str) -> str:
    if not re.fullmatch(r"[\w.+/-]*", text):
        raise InstallError(f"MPI_MODULE={text!r} is no module name; give one as `module load` takes it")
    return text


def _version(text: str) -> str:
    if not re.fullmatch(r"\d[\w.+-]*", text):
        raise InstallError(f"{text!r} is no version; VERSION names one that PREFIX lists, SUFFIX is like -openmpi")
    return text
