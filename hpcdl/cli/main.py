"""The `hpcdl` command: runs the app and turns errors into one line and an exit code."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from pathlib import Path

from hpcdl.cli.output import VERBOSE, command_in, put, say
from hpcdl.core.errors import PACKAGED, HpcdlError, Interrupted, UsageError, cause, shown, without_place
from hpcdl.core.processes.streams import Printed, ignore, keep_interrupts, outlive, use_utf8

_LEAVE_BADLY = {"tensorflow", "mpi4py.MPI"}
"""Modules whose shutdown may never end: thread pools that wait for a lock, MPI_Finalize that waits for dead ranks."""
_MAKE_MORE = {
    "train", "run", "shard", "sweep", "search", "tune-threads", "certify", "export", "infer", "submit", "cancel",
}  # fmt: skip
"""Commands whose work counts even if their output is not read."""
_OTHERS_WORDS = {"run", "submit"}
"""Commands followed by the words of a script or of another command."""
_OUTPUT_OPTIONS = ("--out", "--to", "--html", "--run-dir")
"""Options that name an output path."""
_HOLD_ALL = {"report", "runs"}
"""Commands that keep all data until they end: collecting garbage among thousands of runs would find nothing."""
_PRINT_ALONE = {"--json", "--help", "-h", "--dry-run", "--plan", "--predict"}
"""Flags that make the printed text the result."""


def main() -> None:
    """Run the command line and exit with the exit code of any error."""
    keep_interrupts()
    use_utf8()
    # stderr too: a message that cannot be written must not end the work.
    outlive("stderr")
    printed = outlive("stdout")
    if command_in(sys.argv[1:]) in _HOLD_ALL:
        gc.disable()
    exit_code = run(sys.argv[1:])
    ignore(signal.SIGINT)  # the work is over: Ctrl-C during Python's shutdown would turn it into a failure
    exit_code = _exit_code_of(exit_code, sys.argv[1:], printed)
    if not sys.modules.keys().isdisjoint(_LEAVE_BADLY):
        from hpcdl.rank.start import leave

        leave(exit_code)
    gc.freeze()  # keep the final garbage collection from scanning all objects again
    sys.exit(exit_code)


def _exit_code_of(exit_code: int, arguments: list[str], printed: Printed) -> int:
    """Return `exit_code`, or 1 if requested output could not be printed; any command reports that in one line."""
    # What is still buffered may be what cannot be written.
    sys.stdout.flush()
    if printed.problem is None:
        return exit_code
    why = printed.problem.strerror
    say(f"hpcdl: standard output cannot be written: {why}; what was printed is incomplete, redirect it elsewhere")
    own_words = arguments[: arguments.index("--")] if "--" in arguments else arguments
    prints = not _PRINT_ALONE.isdisjoint(own_words) or command_in(arguments) not in _MAKE_MORE
    return exit_code or int(prints)


def run(arguments: list[str]) -> int:
    """Run `arguments` and return the exit code; messages go to stderr."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # it may be answered from here on
            signal.signal(signal.SIGINT, signal.default_int_handler)
        check_words(arguments)
        from hpcdl.cli.app import app_for  # a slow import, during which Ctrl-C may come

        result = app_for(arguments)(arguments, prog_name="hpcdl", standalone_mode=False)
        if result == Interrupted.exit_code:  # typer's silent answer to Ctrl-C
            raise KeyboardInterrupt
    except HpcdlError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        complain(Interrupted("stopped by Ctrl-C"))
        return Interrupted.exit_code
    except Exception as error:  # noqa: BLE001  the last line of defence; -v shows the traceback
        return _unexpected(error, arguments)
    return result if isinstance(result, int) else 0


def check_words(arguments: list[str]) -> None:
    """Raise UsageError for an empty path or name, as from an unset variable: it would mean the current folder.

    Values of most options may be empty, and the words of a script or a job are not hpcdl's.
    """
    command = command_in(arguments)
    if command != "submit" and _has_own(arguments, "-np"):
        raise UsageError("-np is mpiexec's; type --ranks 2 or -n 2")
    if command in _OTHERS_WORDS:
        return
    for index, word in enumerate(arguments):
        before = arguments[index - 1]
        if not word and not before.startswith("-"):
            raise UsageError(f"word {index + 1} of the line is empty (a variable that is not set?); name it, or `.`")
        if (not word and before in _OUTPUT_OPTIONS) or word in [f"{option}=" for option in _OUTPUT_OPTIONS]:
            option = word.removesuffix("=") or before
            raise UsageError(f"{option} is empty (a variable that is not set?); name a place, or leave {option} out")


def _has_own(arguments: list[str], option: str) -> bool:
    """Return whether `option` comes before any word that is neither an option nor behind one, as a script's name."""
    before = arguments[: arguments.index(option)] if option in arguments else []
    pairs = zip(before[1:], before, strict=False)
    return bool(before) and all(word.startswith("-") or last.startswith("-") for word, last in pairs)


def complain(error: BaseException) -> None:
    """Print the lines of an error on stderr, each after the program's name.

    Wrong user input is wrong on every rank: under a launcher only rank 0 reports it.
    """
    from hpcdl.cluster.environment import placement

    placed = placement()
    if isinstance(error, UsageError) and placed is not None and placed.rank > 0:
        return
    for line in str(error).splitlines():
        say(f"hpcdl: {line}")


def _way_to_type(text: str, arguments: list[str]) -> str:
    """Return what to type where a line has words too many: most often it has spaces that divide a value."""
    if "unexpected extra argument" not in text:
        return ""
    if "=" in arguments:
        return ". `=` has spaces around it; type --option=VALUE"
    if any(word.endswith(",") for word in arguments):
        return ". A list has a space behind its comma; type it without, or in quotes"
    return ". Settings need names, as in --option VALUE, and values with spaces need quotes"


def _unexpected(error: Exception, arguments: list[str]) -> int:
    message = getattr(error, "format_message", None)
    # By name: typer brings its own copy of click, whose classes are private.
    if type(error).__name__ == "NoArgsIsHelpError":
        put(str(getattr(error, "message", "")))
        sys.stdout.flush()
        return 0
    if message is not None:  # typer's own usage errors
        from hpcdl.cli.meant import instead

        context = getattr(error, "ctx", None)
        name = context.command_path if context else f"hpcdl {command_in(arguments)}".rstrip()
        text = instead(" ".join(message().rstrip(".").splitlines()), error)
        commands = getattr(context.command, "commands", {}) if context and context.parent else {}  # those of a group
        if text.startswith("No such command") and "Did you mean" not in text and commands:
            text += f"; `{name}` has {', '.join(commands)}"
        if name == "hpcdl run" and getattr(error, "option_name", None) == "-m":
            text += f": {PACKAGED.format(module='PACKAGE.MODULE')}"
        say(f"hpcdl: {text}{_way_to_type(text, arguments)}; see `{name} --help`")
        return 2
    if type(error).__name__ == "Abort":
        complain(Interrupted("stopped by Ctrl-C"))
        return Interrupted.exit_code
    if type(error).__name__ == "Exit":
        return int(getattr(error, "exit_code", 1))
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # any search for a file may raise it
        complain(UsageError(f"{shown(os.fsdecode(error.filename or ''))} is too long a name; give a shorter one"))
        return UsageError.exit_code
    if isinstance(error, FileNotFoundError) and not Path().stat().st_nlink:
        complain(UsageError("the current folder was removed; `cd` to one that is there"))
        return UsageError.exit_code
    if os.environ.get(VERBOSE):
        raise error
    if line := without_place(error):
        say(f"hpcdl: {line}")
        return 1
    say(f"hpcdl: {type(error).__name__}: {cause(error)} (run again with -v for the traceback)")
    return 1
