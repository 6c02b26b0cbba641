"""Run `make install`, `make uninstall` or `make wheelhouse`, with the environment variables that make exports."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(
    1, str(Path(__file__).resolve().parents[2])
)  # this checkout's hpcdl.core.storage.disk, whatever PYTHON has installed

from build import install, uninstall, wheelhouse
from plan import InstallError, Plan, told
from processes import STOPS, Stopped, ignore_stops

COMMANDS: dict[str, Callable[[Plan], None]] = {"install": install, "uninstall": uninstall, "wheelhouse": wheelhouse}


def stopped(number: int, _frame: object) -> None:
    """Leave by an exception, whose clean-up a second signal does not interrupt."""
    ignore_stops()
    raise Stopped(signal.Signals(number).name)


def main() -> int:
    """Run the command named on the command line; a failure becomes one line and an exit code."""
    os.umask(0o022)  # all users read what a centre installs
    for number in STOPS:
        signal.signal(number, stopped)
    try:
        COMMANDS[sys.argv[1]](Plan.from_environment(os.environ))
    except InstallError as error:
        print(f"hpcdl: {error}", file=sys.stderr)
        return error.exit_code
    except Stopped as stop:
        print(f"hpcdl: stopped by {stop}; nothing was left behind", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"hpcdl: {told(error)}; what this leaves, the next `make install` clears", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
