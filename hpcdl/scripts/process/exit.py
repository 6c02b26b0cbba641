"""How a rank of a script ends: with all the others, or at once and with one line that says why."""

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
"""Names that Python gives to sys.exit, where it was not started with -S."""
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
"""What texts of errors hold that AutoGraph, a graph, a layer of Keras's or a function in a graph has wrapped."""
_PACKAGE = Path(__file__).parents[2]


def leave_together(communicator: Observed, watch: Watchdog, *, called: str = "") -> None:
    """Return when every rank's script is over; a rank that waits for this one before it gets there ends the job.

    `communicator` is one for this alone: what the script itself waits in must not fit. Others may take as long as
    they like, and do what they like: this rank answers, and accuses nobody. `called`: what the script left by.
    """
    seen = communicator.monitor
    how = f"its script has called {called}(0)" if called else "its script has come to its end"
    watch.leaves(f"{how} {after_updates(seen.num_updates)}")
    seen.doing("leaving: its script is over")
    communicator.barrier()


def show(error: BaseException, script: str = "") -> None:
    """Print the traceback of an error in the user's own code; of hpcdl's own errors the line that follows says it all.

    What stands above the first line of `script` is left out.
    """
    error = error.__cause__ or error if isinstance(error, InFunction) else error
    if isinstance(original(error), HpcdlError) and not os.environ.get("HPCDL_VERBOSE"):
        return
    trace = first = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    sys.stderr.write("".join(traceback.format_exception(type(error), error, trace or first)))


class InFunction(HpcdlError):
    """An error in a `tf.function` of the script: its class, its text, and the script's own line that raised it."""


def users_own(error: BaseException) -> BaseException:
    """`error`, or where AutoGraph, TensorFlow or Keras has wrapped it, what the script itself has raised, and where.

    The cause of the new one is `error`, for its traceback.
    """
    found = original(error)
    message = str(found.args[0]) if isinstance(found, KeyError) and found.args else str(found)
    if isinstance(found, HpcdlError) or not any(mark in message for mark in _WRAPPED):
        return error
    lines = [line.strip() for line in _BOLD.sub("", message).splitlines() if line.strip()]
    places = [place for line in lines if (match := _PLACE.match(line)) and (place := _place(*match.groups()))]
    places = places or [place for frame in traceback.extract_tb(found.__traceback__) if (place := _place(*frame[:3]))]
    own = InFunction(f"{_text_in(lines, type(found).__name__)}{f' ({places[-1]})' if places else ''}")
    own.__cause__ = error
    return own


def _place(path: str, line: Any, name: str) -> str:
    """A line of the script's own code; empty for one of a library, of hpcdl or of Python itself."""
    library = path.startswith("<") or "site-packages" in path or Path(path).is_relative_to(_PACKAGE)
    return "" if library else f"{Path(path).name}, line {line}, in {name}"


def _text_in(lines: Sequence[str], name: str) -> str:
    """What an error of class `name` says, of lines that tell in what it has been wrapped."""
    if lines[0].startswith("Exception encountered when calling"):  # Keras
        return f"{name}: {lines[1]}"
    lines = [line for line in lines if not line.startswith("[[{{node")]
    last = max((index for index, line in enumerate(lines) if _PLACE.match(line)), default=-1)
    # A text of several lines begins where its class is named; a function called from a graph has another one.
    classes = [line for line in lines if _CLASS.match(line)]
    if lines[0].startswith("in user code:") or "Traceback (most recent call last):" in lines:
        return next((line for line in reversed(lines) if line.startswith(f"{name}: ")), (classes or lines)[-1])
    return f"{name}: {lines[last + 1] if last + 1 < len(lines) else lines[-1]}"


def speaks_first(folder: Path, state: str) -> bool:
    """Whether no other rank has said yet why the job ends: what several of them find is told by one.

    Who is `state` "bereaved" gives the others time to speak; who may not speak gives them time to end the job.
    """
    if state == "bereaved":
        time.sleep(FIRST_WORD_S)
    try:
        make_folder(folder)
        create(folder / "spoken")
    except FileExistsError:
        time.sleep(FIRST_WORD_S)
        return False
    except OSError:  # no folder to agree in
        return True
    return True


def noting_exit(note: Callable[[Any], None]) -> type[SystemExit]:
    """SystemExit as a script is to know it: `note` gets the code of each one that is made, by `raise` or sys.exit."""
    plain = SystemExit  # the name will be the new one's

    def made(self: SystemExit, *args: Any) -> None:
        plain.__init__(self, *args)
        note(self.code)

    return type("SystemExit", (plain,), {"__init__": made, "__module__": "builtins"})


@dataclass(kw_only=True)
class Ending:
    """What happens at the end of a process that somebody else's launcher has started; in force from `install` on."""

    communicator: Observed
    last: Observed
    """The same ranks, for leaving together alone."""
    watch: Watchdog
    exit_called: tuple[int, float] | None = None
    """The code of the last SystemExit, and when it was made."""

    def install(self) -> None:
        """Take over what Python does when a script ends."""
        sys.excepthook = self._failed
        noted = noting_exit(self._note)
        self._plain = {name: value for name, value in vars(builtins).items() if name in (*QUITTERS, "SystemExit")}
        self._exit = sys.exit

        def leave(code: Any = None) -> NoReturn:
            raise noted(code)

        modules = [one for one in sys.modules.values() if isinstance(one, ModuleType)]
        self._callers = [one for one in modules if object.__getattribute__(one, "__dict__").get("exit") is sys.exit]
        for module in self._callers:
            vars(module)["exit"] = leave
        vars(builtins).update({name: noted if name == "SystemExit" else leave for name in self._plain})
        atexit.register(self._over)
        self._leave_at_once, self._process = os._exit, os.getpid()
        vars(os)["_exit"] = self._left_at_once

    def uninstall(self) -> None:
        """Give it back."""
        sys.excepthook = sys.__excepthook__
        for module in self._callers:
            vars(module)["exit"] = self._exit
        vars(builtins).update(self._plain)
        vars(os)["_exit"] = self._leave_at_once
        atexit.unregister(self._over)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error that nobody catches ends the job: the other ranks would wait for this one for ever."""
        if os.getpid() != self._process:
            leave_as_fork(error)
        from hpcdl.run.ended import one_line, verdict

        mine, found = self.communicator, original(users_own(error))
        state, exit_code = verdict(found)
        if speaks_first(self.watch.folder, state):
            show(error)
            sys.stderr.write(f"hpcdl: rank {mine.rank} on {mine.host}: {one_line(found)}\n")
            sys.stderr.flush()
        mine.abort(exit_code)

    def _left_at_once(self, status: int) -> NoReturn:
        """The script calls os._exit, which a launcher may pass over in silence: as sys.exit, without Python's own end.

        A process that this one has forked leaves as it would.
        """
        vars(os)["_exit"] = self._leave_at_once
        if os.getpid() == self._process and not called_by_hpcdl(sys._getframe(1)):
            code = exit_code_of(status)
            if code:
                self._say_and_abort(code, "os._exit")
            leave_together(self.last, self.watch, called="os._exit")
            from hpcdl.comm.mpi.communicator import finalize

            finalize()
        self._leave_at_once(status)

    def _say_and_abort(self, code: int, called: str) -> None:
        mine = self.communicator
        if speaks_first(self.watch.folder, "failed"):
            sys.stderr.write(f"hpcdl: rank {mine.rank} on {mine.host}: {exited(code, called)}\n")
            sys.stderr.flush()
        mine.abort(code)

    def _note(self, code: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            self.exit_called = exit_code_of(code), time.monotonic()

    def _over(self) -> None:
        """The script is over, by its last line or by sys.exit; with another code than 0 no rank need go on."""
        if os.getpid() != self._process:  # by its own code, which nobody else keeps
            leave_as_fork(SystemExit(self.exit_called[0] if self.exit_called else 0))
        mine = self.communicator
        code, called_s = self.exit_called or (0, 0.0)
        called = mine.monitor.moved_s() < called_s  # else somebody caught it, and the script went on
        if code and called:
            self._say_and_abort(code, "sys.exit")
        leave_together(self.last, self.watch, called="sys.exit" if called else "")
        self.watch.stop()


def leave_as_fork(error: BaseException | None) -> NoReturn:
    """End a process that a rank has forked as Python ends one; MPI, whose job the rank is in, is left alone."""
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
    os._exit(code)


@contextlib.contextmanager
def forks_apart() -> Iterator[None]:
    """Inside, a process that the script forks ends where the script does: it must not leave in its rank's name."""
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
    """Whether it is hpcdl itself that calls os._exit, its last way to end a rank."""
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "hpcdl"


class LeftAtOnce(SystemExit):
    """os._exit of a script under `hpcdl run`, taken for sys.exit: of a process that just ends nobody can tell."""


@contextlib.contextmanager
def leaving_in_order() -> Iterator[None]:
    """Inside, os._exit raises LeftAtOnce. Other threads, forked processes and hpcdl itself leave as they would."""
    plain, process = os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        mine = os.getpid() == process and threading.current_thread() is threading.main_thread()
        if mine and not called_by_hpcdl(sys._getframe(1)):
            raise LeftAtOnce(status)
        plain(status)

    vars(os)["_exit"] = leave
    try:
        yield
    finally:
        vars(os)["_exit"] = plain


def called_in(leaving: SystemExit) -> str:
    """What the script has called."""
    return "os._exit" if isinstance(leaving, LeftAtOnce) else "sys.exit"


def after_updates(number: int) -> str:
    """`after 3 updates`."""
    return f"after {number} update{'s' * (number != 1)}" if number else "before any update"


def exit_code_of(code: Any) -> int:
    """What the system sees of the argument of sys.exit."""
    return 0 if code is None else code & 255 if isinstance(code, int) else 1


def exited(code: int, called: str = "sys.exit") -> str:
    """One line about a script that has ended itself."""
    return f"the script has called {called}({code}), which ends all ranks"
