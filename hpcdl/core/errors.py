"""One tree of errors; each class knows the exit code that the command line turns it into.

    HpcdlError                1    failed while working
    ├── RankError             1    one rank failed; carries its number and host
    │   └── BrokenGroup       1    a group has lost a rank; the remaining ranks can form another
    ├── NotFiniteError        1    NaN or infinity in gradients or weights of this rank
    ├── UsageError            2    the user's input is unusable
    │   ├── UnknownNameError  2    a name that no registry has
    │   ├── ConfigError       2    one or more settings, all reported at once
    │   └── SourceError       2    a source of data that cannot be read
    ├── CorruptError          3    something that hpcdl wrote fails its check
    ├── StoppedEarly          75   stopped with something to resume
    └── Interrupted           130  stopped with nothing to resume

A message is one line: what was given, what is possible, what to type.
"""

from __future__ import annotations

import builtins
import contextlib
import difflib
import errno
import functools
import json
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hpcdl.core.units import listed

NOT_FINITE = "not-finite"
"""The kind of a failure that is likely to recur with the same seed and settings."""
PACKAGED = (
    "hpcdl run takes a file; put `import runpy; runpy.run_module('{module}', run_name='__main__')` into one beside the "
    "package, and run that"
)
"""What to do with a script that is a part of a package."""
LONGEST_SHOWN = 120
MOST_NAMES = 40
"""Names that a message lists; of more it shows the nearest."""
NEAREST_SHOWN = 5
LONGEST_LINE = 1000
# Control codes, marks that change the direction of writing, separators of lines and paragraphs, half characters.
_OBEYED = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class HpcdlError(Exception):
    """An error that the user reads as one line or a few, without control codes.

    `kind` is one word for programs that must decide how to react; empty if none has to.
    """

    exit_code = 1
    kind = ""

    def __init__(self, *lines: str) -> None:
        """Clean the lines of control codes; a very long line keeps its head and its end."""
        clean = map(printable, lines)
        super().__init__("\n".join(x if len(x) <= LONGEST_LINE else f"{x[:700]} ... {x[-250:]}" for x in clean))


class RankError(HpcdlError):
    """A rank failed; `rank` and `host` say which one, `exit_code` is the rank's own.

    `lost`: it is gone or does not respond, through no fault of its own; new ranks could take its place. `node`: the
    node that went down as a whole, if any. `evicted`: it is alive, but too slow to continue with. `kind` is that of the
    rank's own error.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        host: str = "",
        exit_code: int = 1,
        lost: bool = False,
        node: str = "",
        evicted: bool = False,
        kind: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.node, self.evicted = node, evicted
        self.rank = rank
        self.host = host
        self.exit_code = exit_code
        self.lost = lost


class BrokenGroup(RankError):
    """A group has lost a rank, or another rank has revoked it for that reason: it transfers no more messages."""


class NotFiniteError(HpcdlError):
    """Gradients or weights of this rank hold NaN or infinity; found before anything stores them."""

    kind = NOT_FINITE


class UsageError(HpcdlError):
    """The user's input is unusable; found before anything is written."""

    exit_code = 2


class UnknownNameError(UsageError):
    """A name that is not among the known ones."""

    def __init__(self, kind: str, name: str, known: Iterable[str], like: str = "") -> None:
        """`like` is the known name that means the same, if it does not resemble `name`."""
        super().__init__(f"unknown {kind} {name!r}{suggestion(like or name, known)}")


class ConfigError(UsageError):
    """One or more settings are wrong; `problems` holds a line for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(*self.problems)


class Refusals:
    """Gathers the errors of several checks, so that the user sees all of them at once."""

    def __init__(self) -> None:
        self._found: list[UsageError] = []

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep a UsageError for later. Any other HpcdlError is raised at once, unless a kept UsageError replaces it."""
        try:
            yield
        except UsageError as error:
            self._found.append(error)
        except HpcdlError:
            self.raise_all()
            raise

    def raise_all(self) -> None:
        """Raise a single kept error unchanged, or several as one ConfigError, each line once."""
        if len(self._found) == 1:
            raise self._found[0]
        if self._found:
            raise ConfigError(dict.fromkeys(line for error in self._found for line in str(error).splitlines()))


class SourceError(UsageError):
    """A data source is missing, empty or not of the expected format."""


class CorruptError(HpcdlError):
    """A shard, manifest, checkpoint or record fails its check."""

    exit_code = 3


class StoppedEarly(HpcdlError):
    """Stopped by a signal, a time limit or Ctrl-C; `--resume` continues from here.

    `node`: the lost node that made the ranks stop, if that was the reason. `grows`: they stopped so that more ranks can
    continue.
    """

    exit_code = 75

    def __init__(self, *lines: str, node: str = "", grows: bool = False) -> None:
        super().__init__(*lines)
        self.node, self.grows = node, grows


class Interrupted(HpcdlError):
    """Stopped by Ctrl-C with nothing to resume."""

    exit_code = 130


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the tail of an error message: the nearest known name, then all of them, or some of very many."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=NEAREST_SHOWN, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ";"
    most = len(names) if len(names) <= MOST_NAMES else len(nearest) or NEAREST_SHOWN
    ordered = names if most == len(names) else [*nearest, *(other for other in names if other not in nearest)]
    # A comma within a name would look like one between two names.
    apart = [*map(repr, ordered)] if any("," in known_name for known_name in names) else ordered
    return f"{hint} known: {listed(apart, most)}" if names else "; none is known"


def printable(text: str) -> str:
    """Return `text` as one line that is safe on a terminal: other characters become question marks.

    These are control codes, line breaks, marks that change the direction of writing, and bytes of names that are not
    UTF-8.
    """
    # Fast path: most text is plain, and a report of thousands of runs passes all of its cells.
    return text if text.isascii() and text.isprintable() else _OBEYED.sub("?", text)


def shown(value: object) -> str:
    """Return the repr of the user's value for a one-line message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


_MARK = "hpcdl-carries:"
Result = TypeVar("Result")


class CarriedError(Exception):
    """An error encoded as text, for a library that keeps only the text of an error; `original` decodes it."""


def carried(function: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap `function` for such a library (TensorFlow's graphs), so that `original` can recover its error."""

    @functools.wraps(function)
    def call(*inputs: Any) -> Result:
        try:
            return function(*inputs)
        except Exception as error:
            facts = [[name, value] for name, value in vars(error).items() if _is_plain(value)]
            arguments = [*error.args] if _is_plain(error.args) else [str(error)]
            encoded = json.dumps([type(error).__name__, str(error), arguments, facts])
            raise CarriedError(_MARK + encoded) from error

    return call


def original(error: BaseException) -> BaseException:
    """Return the error that a carried function raised, with its class and text; `error` itself if it holds none.

    Also finds the HpcdlError that a library wrapped in an error of its own, with more text around it (as AutoGraph
    does).
    """
    text = str(error)
    if _MARK not in text:
        if isinstance(error, HpcdlError):  # it says more than the error it was raised from
            return error
        before = error.__context__
        while before is not None and not (isinstance(before, HpcdlError) and str(before) in text):
            before = before.__context__
        return before or error
    try:
        name, message, arguments, facts = json.JSONDecoder().raw_decode(text, text.index(_MARK) + len(_MARK))[0]
    except ValueError:  # the library cut the text short
        return error
    kind = {error_class.__name__: error_class for error_class in _tree(HpcdlError)}.get(name) or getattr(
        builtins, name, None
    )
    if isinstance(kind, type) and issubclass(kind, Exception):  # the text may name any builtin, even `eval`
        # `__init__` is not called: its parameters differ by class, and `args` and `vars` hold all of the state.
        restored = kind.__new__(kind, *arguments)
        restored.args = tuple(arguments)
        vars(restored).update(facts)
        if str(restored) == message:
            return restored
    return HpcdlError(f"{name}: {message}")


def kind_of(error: BaseException) -> str:
    """Return the kind of the error that `error` carries or is; empty if it has none."""
    cause = original(error)
    return cause.kind if isinstance(cause, HpcdlError) else ""


@contextlib.contextmanager
def originals() -> Iterator[None]:
    """Raise the original error in place of one that carries it."""
    try:
        yield
    except Exception as error:
        cause = original(error)
        if cause is error:
            raise
        raise cause from error


def _tree(root: type[HpcdlError]) -> Iterator[type[HpcdlError]]:
    yield root
    for branch in root.__subclasses__():
        yield from _tree(branch)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(item, str | int | float) for item in value)
    return isinstance(value, str | int | float | None)


NO_PLACE = {
    errno.ENOSPC: "make room (`df -h`, `df -i`), or choose another place",
    errno.EDQUOT: "your quota is used up: remove some, or choose another place",
    errno.EROFS: "choose another place",
    errno.EFBIG: "raise the limit of a file's size (`ulimit -f`), or choose another place",
}
"""Reasons why nothing can be written to a place, with the remedy."""

NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Reasons why this user cannot write to a place: another one must be named, which is the user's to do."""


def without_place(error: BaseException) -> str:
    """Return the line for an error about a place that accepts no data; empty for all other errors."""
    if not isinstance(error, OSError) or error.errno not in NO_PLACE:
        return ""
    where = f"cannot write {printable(os.fsdecode(error.filename))}: " if error.filename else ""
    return f"{where}{os.strerror(error.errno)}; {NO_PLACE[error.errno]}"  # HDF5 puts more than that into its own text


_STYLE = re.compile("\x1b\\[[0-9;]*m")
_CALL = "Exception encountered when calling"
"""How Keras begins the text of an error in a layer; the cause follows in the next line."""


def lines_of(error: BaseException) -> list[str]:
    """Return the lines of an error's text from the one that names its cause, without the terminal's styles."""
    lines = [line.strip() for line in _STYLE.sub("", str(error)).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith(_CALL):
        del lines[0]
    return lines


def cause(error: BaseException) -> str:
    """Return the line of an error's text that names its cause."""
    return next(iter(lines_of(error)), "no details")


def failure(error: BaseException, file: str = "") -> str:
    """Return `failed at FILE:LINE: TYPE: TEXT` with the innermost line in `file`, or else the innermost line of all."""
    if isinstance(error, SyntaxError):
        where: str | None = f"{error.filename}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if frame.filename == file] or frames[-1:]
        where = f"{own_frames[-1].filename}:{own_frames[-1].lineno}" if own_frames else None
    remedy = "; install it, or add its folder to PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
    return f"failed at {where}: {type(error).__name__}: {cause(error)}{remedy}"
