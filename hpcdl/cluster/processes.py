"""Commands on all nodes with a time limit, and the removal of processes that remain."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcdl.cluster.launchers.base import Launcher
from hpcdl.core.errors import HpcdlError
from hpcdl.core.protocols import LaunchPlan

OWN_WORD = "hpcdl: "
"""Prefix of stderr lines that matter more than the launcher's own messages."""
NUM_LOOKS, PAUSE_S = 3, 0.05
"""Repeated searches for marked processes: a process that is just starting a program briefly shows no environment."""


class NodesFailed(HpcdlError):
    """A command failed on a node, or did not end on all of them; `printed` is its stdout until then."""

    def __init__(self, text: str, printed: str = "") -> None:
        """Take the message, and the output until then."""
        super().__init__(text)
        self.printed = printed


def on_every_node(
    launcher: Launcher,
    num_nodes: int,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    timeout_s: float,
    what: str,
    mpi: bool = False,
) -> str:
    """Run `command` once on each of the job's first nodes and return all its stdout; as ranks of one job with `mpi`.

    Raises NodesFailed, beginning with `what`, if it fails or takes too long.
    """
    plan = LaunchPlan(num_ranks=num_nodes, ranks_per_node=1)
    # Without `mpi` the launchers with mpiexec refuse, or start only one process; srun starts any program on every node.
    line, needed = launcher.line(plan, command, mpi=mpi or launcher.name != "slurm", environment=environment)
    try:
        done = subprocess.run(
            line,
            env={**environment, **needed},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""  # bytes, even though text was requested
        raise NodesFailed(f"{what}: `{line[0]}` did not end in {timeout_s:g} s", bytes(printed).decode()) from None
    except OSError as error:
        raise NodesFailed(f"{what}: `{line[0]}` cannot be started: {error.strerror}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        messages = [text.removeprefix(OWN_WORD) for text in lines if text.startswith(OWN_WORD)]
        message = messages[0] if messages else f"`{line[0]}` failed: {lines[-1]}"
        raise NodesFailed(f"{what}: {message}", done.stdout)
    return done.stdout


def stop(processes: Sequence[subprocess.Popen[bytes]], soft_s: float) -> None:
    """Ask launchers to leave, twice (they then kill their ranks), and kill those that do not; `soft_s` for each."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)
        deadline = time.monotonic() + soft_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.01))


def end_marked(variable: str, value: str) -> None:
    """Kill this user's processes on this node that have `variable`=`value` in their environment, except this one."""
    for _ in range(NUM_LOOKS):
        for number in marked(variable, value):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(number, signal.SIGKILL)
        time.sleep(PAUSE_S)


def marked(variable: str, value: str) -> list[int]:
    """Return this user's processes on this node that have `variable`=`value` in their environment, except this one."""
    mark = f"{variable}={value}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        number = int(entry.parent.name)
        with contextlib.suppress(OSError):
            if number != os.getpid() and mark in entry.read_bytes().split(b"\0"):
                pids.append(number)
    return pids
