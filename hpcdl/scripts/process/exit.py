"""How a rank of a script ends: together with all others, or at once with one line that gives the reason."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hpcdl.core.errors import HpcdlError, original
from hpcdl.core.storage.disk import create, make_folder

if TYPE_CHECKING:
    from hpcdl.comm.observed import Observed
    from hpcdl.supervision.watchdog import Watchdog

QUITTERS = ("exit", "quit")
"""Names that Python gives to sys.exit, unless it was started with -S."""
FIRST_WORD_S = 3.0
_PLACE = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_CLASS = re.compile(r"(\w+\.)*[A-Z]\w*(Error|Exception|Interrupt|Iteration)\b")
_BOLD = re.compile(r"\x1b\[\d*m")
_WRAPPED = (
    "in user code:",
    "Graph execution error:",
    "Exception encountered when calling",
    "Traceback (most recent call last):",
)
"""Marks of error texts that AutoGraph, a graph, a Keras layer or a function in a graph has wrapped."""
_PACKAGE = Path(__file__).parents[2]


def leave_together(communicator: Observed, watch: Watchdog, *, called: str = "") -> None:
    """Return when every rank's script is over. A rank that waits for this one in another operation ends the job.

    `communicator` must be separate, so that the script's own operations cannot match. Other ranks may take as long as
    they like: this rank answers and blames none. `called`: the function by which the script left.
    """
    monitor = communicator.monitor
    how = f"its script has called {called}(0)" if called else "its script has come to its end"
    watch.leaves(f"{how} {after_updates(monitor.num_updates)}")
    monitor.doing("leaving: its script is over")
    communicator.barrier()


def show(error: BaseException, script: str = "") -> None:
    """Print the traceback of an error in the user's own code. For hpcdl's own errors the line that follows is enough.

    Frames above the first line of `script` are omitted.
    """
    error = error.__cause__ or error if isinstance(error, InFunction) else error
    if isinstance(original(error), HpcdlError) and not os.environ.get("HPCDL_VERBOSE"):
        return
    trace = first = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    sys.stderr.write("".join(traceback.format_exception(type(error), error, trace or first)))


class InFunction(HpcdlError):
    """An error in a `tf.function` of the script: its class, its text, and the script's line that raised it."""


def users_own(error: BaseException) -> BaseException:
    """Return `error`, or if AutoGraph, TensorFlow or Keras has wrapped it, the script's own error and its line.

    The cause of the new error is `error`, which keeps its traceback.
    """
    cause = original(error)
    message = str(cause.args[0]) if isinstance(cause, KeyError) and cause.args else str(cause)
    if isinstance(cause, HpcdlError) or not any(mark in message for mark in _WRAPPED):
        return error
    lines = [line.strip() for line in _BOLD.sub("", message).splitlines() if line.strip()]
    places = [place for line in lines if (match := _PLACE.match(line)) and (place := _place(*match.groups()))]
    places = places or [place for frame in traceback.extract_tb(cause.__traceback__) if (place := _place(*frame[:3]))]
    # The last place is the innermost line of the script.
    in_script = InFunction(f"{_text_in(lines, type(cause).__name__)}{f' ({places[-1]})' if places else ''}")
    in_script.__cause__ = error
    return in_script


def _place(path: str, line: Any, name: str) -> str:
    """Return a line of the script's own code as text; empty for one of a library, of hpcdl or of Python."""
    library = path.startswith("<") or "site-packages" in path or Path(path).is_relative_to(_PACKAGE)
    return "" if library else f"{Path(path).name}, line {line}, in {name}"


def _text_in(lines: Sequence[str], name: str) -> str:
    """Return the text of an error of class `name` from the lines of the error that wraps it."""
    if lines[0].startswith("Exception encountered when calling"):  # Keras
        return f"{name}: {lines[1]}"
    lines = [line for line in lines if not line.startswith("[[{{node")]
    last = max((index for index, line in enumerate(lines) if _PLACE.match(line)), default=-1)
    # A text of several lines begins with the name of its class. A function called from a graph raises another class.
    classes = [line for line in lines if _CLASS.match(line)]
    if lines[0].startswith("in user code:") or "Traceback (most recent call last):" in lines:
        return next((line for line in reversed(lines) if line.startswith(f"{name}: ")), (classes or lines)[-1])
    return f"{name}: {lines[last + 1] if last + 1 < len(lines) else lines[-1]}"


def speaks_first(folder: Path, state: str) -> bool:
    """Return whether no other rank has given a reason for the end yet: if several find one, only one prints it.

    A rank whose `state` is "bereaved" first gives the others time to speak. A refused rank waits for the job's end.
    """
    if state == "bereaved":
        time.sleep(FIRST_WORD_S)
    try:
        make_folder(folder)
        # Creating the file succeeds on one rank alone.
        create(folder / "spoken")
    except FileExistsError:
        time.sleep(FIRST_WORD_S)
        return False
    except OSError:  # no folder to agree in
        return True
    return True


def noting_exit(note: Callable[[Any], None]) -> type[SystemExit]:
    """Return a SystemExit class for scripts: `note` gets the code of each instance, made by `raise` or sys.exit."""
    plain = SystemExit  # the new class takes the name over

    def made(self: SystemExit, *args: Any) -> None:
        plain.__init__(self, *args)
        note(self.code)

    # Of builtins, so that tracebacks show it as Python's own.
    return type("SystemExit", (plain,), {"__init__": made, "__module__": "builtins"})


@dataclass(kw_only=True)
class ProcessEnd:
    """The end of a process that another launcher has started. It takes effect with `install`."""

    communicator: Observed
    last: Observed
    """A communicator of the same ranks, only for leaving together."""
    watch: Watchdog
    warnings: Callable[[Observed], list[str]] = lambda _: []
    """Returns what to warn of once every rank's script is over. Collective."""
    exit_called: tuple[int, float] | None = None
    """The code of the last SystemExit, and the time of its creation."""

    def install(self) -> None:
        """Replace what Python does when a script ends."""
        sys.excepthook = self._failed
        noted = noting_exit(self._note)
        self._plain = {name: value for name, value in vars(builtins).items() if name in (*QUITTERS, "SystemExit")}
        self._exit = sys.exit

        def leave(code: Any = None) -> NoReturn:
            raise noted(code)

        modules = [one for one in sys.modules.values() if isinstance(one, ModuleType)]
        # A lazy module would import itself at any other access to its attributes.
        self._callers = [one for one in modules if object.__getattribute__(one, "__dict__").get("exit") is sys.exit]
        for module in self._callers:
            # `from sys import exit` has given a module its own reference to the function.
            vars(module)["exit"] = leave
        vars(builtins).update({name: noted if name == "SystemExit" else leave for name in self._plain})
        atexit.register(self._over)
        self._leave_at_once, self._process = os._exit, os.getpid()
        # atexit does not see os._exit, and the other ranks would wait for this one.
        vars(os)["_exit"] = self._left_at_once

    def uninstall(self) -> None:
        """Restore what `install` replaced."""
        sys.excepthook = sys.__excepthook__
        for module in self._callers:
            vars(module)["exit"] = self._exit
        vars(builtins).update(self._plain)
        vars(os)["_exit"] = self._leave_at_once
        atexit.unregister(self._over)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End the job after an uncaught error: the other ranks would wait for this one for ever."""
        if os.getpid() != self._process:
            leave_as_fork(error)
        from hpcdl.run.ended import one_line, verdict

        communicator, cause = self.communicator, original(users_own(error))
        state, exit_code = verdict(cause)
        if speaks_first(self.watch.folder, state):
            show(error)
            sys.stderr.write(f"hpcdl: rank {communicator.rank} on {communicator.host}: {one_line(cause)}\n")
            sys.stderr.flush()
        communicator.abort(exit_code)

    def _left_at_once(self, status: int) -> NoReturn:
        """Treat os._exit as sys.exit, without Python's cleanup: a launcher might not notice it.

        A forked process leaves as it would without hpcdl.
        """
        vars(os)["_exit"] = self._leave_at_once
        if os.getpid() == self._process and not called_by_hpcdl(sys._getframe(1)):
            code = exit_code_of(status)
            if code:
                self._report_and_abort(code, "os._exit")
            self._leave("os._exit")
            from hpcdl.comm.mpi.communicator import finalize

            # os._exit runs no exit functions, and an MPI launcher takes a rank without MPI_Finalize for a failed one.
            finalize()
        self._leave_at_once(status)

    def _report_and_abort(self, code: int, called: str) -> None:
        communicator = self.communicator
        if speaks_first(self.watch.folder, "failed"):
            sys.stderr.write(f"hpcdl: rank {communicator.rank} on {communicator.host}: {exited(code, called)}\n")
            sys.stderr.flush()
        communicator.abort(code)

    def _note(self, code: Any) -> None:
        # In another thread SystemExit ends that thread alone.
        if threading.current_thread() is threading.main_thread():
            self.exit_called = exit_code_of(code), time.monotonic()

    def _over(self) -> None:
        """End a script that reached its last line or called sys.exit. A code other than 0 ends all ranks."""
        if os.getpid() != self._process:  # its own code, which no other process records
            leave_as_fork(SystemExit(self.exit_called[0] if self.exit_called else 0))
        communicator = self.communicator
        code, called_s = self.exit_called or (0, 0.0)
        called = communicator.monitor.moved_s() < called_s  # else the script caught it and continued
        if code and called:
            self._report_and_abort(code, "sys.exit")
        self._leave("sys.exit" if called else "")
        self.watch.stop()

    def _leave(self, called: str) -> None:
        leave_together(self.last, self.watch, called=called)
        texts = self.warnings(self.last)
        if self.communicator.rank == 0:
            sys.stderr.writelines(f"hpcdl: warning: {text}\n" for text in texts)


def leave_as_fork(error: BaseException | None) -> NoReturn:
    """End a forked process as Python does, without MPI, because the rank's MPI job belongs to its parent."""
    code = 0
    if isinstance(error, SystemExit):
        code = exit_code_of(error.code)
        if error.code is not None and not isinstance(error.code, int):
            sys.stderr.write(f"{error.code}\n")
    elif error is not None:
        code = 1
        traceback.print_exception(error)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: exit functions of the parent, MPI's among them, would run in the fork.
    os._exit(code)


@contextlib.contextmanager
def forks_apart() -> Iterator[None]:
    """Make a process that the script forks end inside this context: it must not leave in its rank's name."""
    process = os.getpid()
    try:
        yield
    except BaseException as error:
        if os.getpid() != process:
            leave_as_fork(error)
        raise
    if os.getpid() != process:
        leave_as_fork(None)


def called_by_hpcdl(frame: FrameType) -> bool:
    """Return whether hpcdl itself calls os._exit, as its last way to end a rank."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "hpcdl"


class LeftAtOnce(SystemExit):
    """os._exit of a script under `hpcdl run`, treated as sys.exit: a process that just ends leaves no trace."""


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """Make os._exit raise LeftAtOnce, except in other threads, in forked processes and in hpcdl itself."""
    plain, process = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        in_main = os.getpid() == process and threading.current_thread() is threading.main_thread()
        if in_main and not called_by_hpcdl(sys._getframe(1)):
            raise LeftAtOnce(status)
        plain(status)

    vars(os)["_exit"] = leave
    try:
        yield
    finally:
        vars(os)["_exit"] = plain


def called_in(leaving: SystemExit) -> str:
    """Return the name of the function that the script has called."""
    return "os._exit" if isinstance(leaving, LeftAtOnce) else "sys.exit"


def after_updates(number: int) -> str:
    """Return a text such as `after 3 updates`."""
    return f"after {number} update{'s' * (number != 1)}" if number else "before any update"


def exit_code_of(code: Any) -> int:
    """Return the exit code that the system sees for an argument of sys.exit."""
    return 0 if code is None else code & 255 if isinstance(code, int) else 1


def exited(code: int, called: str = "sys.exit") -> str:
    """Return one line about a script that has ended itself."""
    return f"the script has called {called}({code}), which ends all ranks"
