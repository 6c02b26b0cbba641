"""How a rank of a script ends: with all the others, or at once and with one line that says why."""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import time
import traceback
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hpcdl.core.errors import HpcdlError, original

if TYPE_CHECKING:
    from hpcdl.comm.observed import Observed
    from hpcdl.training.session.watch import Watch


def leave_together(communicator: Observed, watch: Watch) -> None:
    """Return when every rank's script is over; a rank that waits for this one before it gets there ends the job.

    `communicator` is one for this alone: what the script itself waits in must not fit. Others may take as long as
    they like, and do what they like: this rank answers, and accuses nobody.
    """
    watch.accuses = False
    communicator.observation.doing("leaving: its script is over; let all ranks exit alike, and give all as many steps")
    communicator.barrier()


def show(error: BaseException, script: str = "") -> None:
    """Print the traceback of an error in the user's own code; of hpcdl's own errors the line that follows says it all.

    What stands above the first line of `script` is left out.
    """
    if isinstance(original(error), HpcdlError) and not os.environ.get("HPCDL_VERBOSE"):
        return
    trace = first = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    sys.stderr.write("".join(traceback.format_exception(type(error), error, trace or first)))


@dataclass(kw_only=True)
class Ending:
    """What happens at the end of a process that somebody else's launcher has started; in force from `install` on."""

    communicator: Observed
    last: Observed
    """The same ranks, for leaving together alone."""
    watch: Watch
    exit_called: tuple[int, float] | None = None
    """The code of the last call of sys.exit, and when that was."""

    def install(self) -> None:
        """Take over what Python does when a script ends."""
        self._exit = sys.exit
        sys.excepthook = self._failed
        sys.exit = self._note_exit
        self._quitters: dict[str, Any] = {name: value for name, value in vars(builtins).items() if name in QUITTERS}
        vars(builtins).update(dict.fromkeys(self._quitters, self._note_exit))
        atexit.register(self._over)

    def uninstall(self) -> None:
        """Give it back."""
        sys.excepthook = sys.__excepthook__
        sys.exit = self._exit
        vars(builtins).update(self._quitters)
        atexit.unregister(self._over)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error that nobody catches ends the job: the other ranks would wait for this one for ever."""
        from hpcdl.training.session.rank import one_line, verdict

        mine, found = self.communicator, original(error)
        show(error)
        sys.stderr.write(f"hpcdl: rank {mine.rank} on {mine.host}: {one_line(found)}\n")
        mine.abort(verdict(found)[1])

    def _note_exit(self, code: Any = None) -> NoReturn:
        self.exit_called = exit_code_of(code), time.monotonic()
        self._exit(code)

    def _over(self) -> None:
        """The script is over, by its last line or by sys.exit; with another code than 0 no rank need go on."""
        mine = self.communicator
        code, called_s = self.exit_called or (0, 0.0)
        if code and mine.observation.moved_s() < called_s:  # else somebody caught it, and the script went on
            sys.stderr.write(f"hpcdl: rank {mine.rank} on {mine.host}: {exited(code)}\n")
            sys.stderr.flush()
            mine.abort(code)
        leave_together(self.last, self.watch)
        self.watch.stop()


QUITTERS = ("exit", "quit")
"""Names that Python gives to sys.exit, where it was not started with -S."""


def exit_code_of(code: Any) -> int:
    """What the system sees of the argument of sys.exit."""
    return 0 if code is None else code & 255 if isinstance(code, int) else 1


def exited(code: int) -> str:
    """One line about a script that has ended itself."""
    return f"the script has called sys.exit({code}), which ends all ranks"
