"""A reader of the user's own, FILE.py:NAME: its code runs where the command line names it, and nowhere else."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcdl.core.errors import SourceError, UnknownNameError, UsageError, failure, shown
from hpcdl.core.storage.files import read_bytes

FORM = "--reader FILE.py:NAME, a function or class that is called with the path of SOURCE"


@dataclass(frozen=True, kw_only=True)
class UserReader:
    """What --reader names: `content` is what is run, `digest` its SHA-256."""

    spec: str
    path: Path
    name: str
    content: bytes
    digest: str

    def called(self, source: Path) -> Any:
        """What the function or class returns for `source`; SourceError names the line that fails."""
        module = ModuleType(f"hpcdl_user_reader_{self.path.stem}")
        module.__file__ = str(self.path.absolute())
        sys.modules[module.__name__] = module  # as an import does: classes in the file look themselves up there
        with self.running():
            exec(compile(self.content, str(self.path), "exec"), vars(module))
        function = getattr(module, self.name, None)
        if function is None:
            known = [name for name, own in vars(module).items() if callable(own) and own.__module__ == module.__name__]
            raise UnknownNameError(f"name in the reader {self.path}:", self.name, known)
        if not callable(function):
            raise UsageError(f"reader {self.spec} is not a function but {type(function).__name__}; give {FORM}")
        with self.running():
            return function(source)

    @contextmanager
    def running(self, what: str = "") -> Iterator[None]:
        """Inside runs the user's code, on `what`: it prints to stderr, and its errors are one line that says where."""
        try:
            with redirect_stdout(sys.stderr):  # stdout is for --json, and for what writing processes report
                yield
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise SourceError(f"reader {self.spec}{what and f', {what}'} {failure(error, str(self.path))}") from error


def user_reader(spec: str) -> UserReader:
    """The reader that `spec` names, its file read but not run; UsageError where there is none."""
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"--reader {shown(spec)} is not understood; give {FORM}")
    path = Path(file).expanduser()
    try:
        content = read_bytes(path)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--reader {shown(spec)}: cannot read {shown(file)}: {why}; give {FORM}") from error
    return UserReader(spec=spec, path=path, name=name, content=content, digest=hashlib.sha256(content).hexdigest())
