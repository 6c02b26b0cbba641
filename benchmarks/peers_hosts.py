"""hpcdl beside Horovod and PyTorch DDP over gloo, with a rank on each of several hosts with shaped links.

    python -m benchmarks.peers_hosts [--hosts 8] [--rate 1gbit] [--tries 3] [--steps 4]
                                     [--engines ring,auto,horovod,pytorch-ddp] [--network resnet50] [--seconds 0.7]

Engines take turns on tests/lab's hosts. Their computing is a wait (hpcdl/models/emulated.py): the network's gradients
become ready in 16 pieces, at the same moments with every engine. Steps with and without exchange take turns in the
same processes; a step lasts until its slowest rank ends, including the SGD updates. One thread computes in a rank.

All hosts share the processors of this machine, which do the copies, sums and TCP of all hosts. If the links could carry
more than the cores can feed, an engine pays for its processor time, more than on hosts with their own cores. The bytes
that a host sends per step, counted at its link, show that engines exchange the same amount. They include one more
network for the first weights (Horovod's ranks begin alike without it), and the messages by which `auto` chooses.

Horovod and PyTorch use the environments of `make peers` in build/; Horovod needs the Open MPI of its build.
Needs root.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.peers import environment, tables
from benchmarks.peers.__main__ import ENVIRONMENT, HERE, LABELS, PYTORCH_ENVIRONMENT, ROOT
from benchmarks.peers.steps import WARMUP_STEPS
from benchmarks.shaped_hosts import run_on, run_on_by_open_mpi
from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launcher_of
from hpcdl.core.errors import HpcdlError, UnknownNameError, UsageError
from hpcdl.models.table import model_info
from tests.lab.hosts import ADDRESSES, Lab, lab_folder, megabits
from tests.lab.needs import missing

OWN, ENGINES = ("ring", "auto"), ("ring", "auto", "horovod", "pytorch-ddp")
WITHOUT = "or leave it out: --engines ring,auto"
PATIENCE_S = 580.0
PORT = "29500"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "HPCDL_INTRA_OP_THREADS": "1", "HPCDL_INTER_OP_THREADS": "2"}
"""The second thread of TensorFlow is the waiting one."""


@dataclass(frozen=True, kw_only=True)
class HostsTry(tables.Try):
    """One engine's run; `sent_bytes` is what a host's link sent per step with exchange, for the median host.

    This includes what ranks send before their first step, divided among the steps.
    """

    sent_bytes: float = 0.0


class EnginesOnHosts:
    """How each engine runs on `lab`; a missing one is reported before any measurement."""

    def __init__(self, chosen: Sequence[str]) -> None:
        bare = dict(os.environ)
        self._mpiexec = find_mpiexec()
        if "pytorch-ddp" in chosen:
            self._pytorch = environment.with_pytorch(ROOT / PYTORCH_ENVIRONMENT, bare, WITHOUT)
        if "horovod" in chosen:
            self._mpirun = open_mpi()
            self._horovod = environment.with_horovod(ROOT / ENVIRONMENT, bare, WITHOUT)

    def run(self, engine: str, lab: Lab, given: argparse.Namespace) -> str:
        """Return the output of the engine's ranks."""
        plan = [str(lab.shared / "waits.json"), str(given.steps)]
        own = {**environment_for(self._mpiexec.flavour), **ONE_THREAD}
        if engine == "horovod":
            command = [str(self._horovod), str(HERE / "horovod_waits.py"), *plan]
            return run_on_by_open_mpi(lab, self._mpirun, command, PATIENCE_S, ONE_THREAD)
        if engine == "pytorch-ddp":
            meeting = {"MASTER_ADDR": ADDRESSES[lab.nodes[0]], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
            command = [str(self._pytorch), str(HERE / "pytorch_waits.py"), *plan]
            return run_on(lab, self._mpiexec.path, command, PATIENCE_S, {**own, **meeting})
        command = [
            str(Path(sys.executable).parent / "hpcdl"), "bench", "step", "--strategy", engine, "--batch-size", "1",
            "--model", f"emulated:{given.network}:{given.seconds}s", "--steps", str(given.steps),
            "--warmup-steps", str(WARMUP_STEPS), "--json",
        ]  # fmt: skip
        return run_on(lab, self._mpiexec.path, command, PATIENCE_S, own)


def open_mpi() -> Path:
    """Return Open MPI's mpirun; raises UsageError if there is none."""
    for name in ("mpirun.openmpi", "mpirun"):
        if launcher_of(Path(name))[0] == "openmpi":
            return Path(name)
    raise UsageError(f"no mpirun on PATH is Open MPI's, which Horovod needs; apt-get install openmpi-bin, {WITHOUT}")


def plan_of_waits(network: str, seconds: float) -> dict[str, Any]:
    """Return the plan for the peers, by which their gradients become ready as in hpcdl's emulation."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from hpcdl.models.emulated import FORWARD, pieces
    from hpcdl.models.load import load_model

    shapes = [list(variable.shape) for variable in load_model(network).trainable_variables]
    ready = [[shapes[place] for place in part] for part in pieces(len(shapes))]
    return {"seconds": seconds, "forward": FORWARD, "pieces": ready}


def sent_bytes(lab: Lab) -> list[int]:
    """Return the bytes that each host has sent so far."""
    told = [lab.run(["cat", "/proc/net/dev"], host=node).out for node in lab.nodes]
    return [int(text.split("eth0:")[1].split()[8]) for text in told]


def measure(engine: str, number: int, run: Callable[[], str], count: Callable[[], list[int]], given: Any) -> HostsTry:
    """Measure one try; any failure becomes its `error`, which the table shows."""
    known = {
        "network": given.network, "engine": engine, "number": number, "batch_size": 1, "steps": given.steps,
        "load": os.getloadavg()[0],
    }  # fmt: skip
    before = count()
    try:
        text = run()
        found = json.JSONDecoder().raw_decode(text, text.index("{"))[0]
    except subprocess.TimeoutExpired:
        return HostsTry(**known, error=f"not over after {PATIENCE_S:.0f} s")
    except (SystemExit, ValueError) as error:
        print(error, file=sys.stderr)
        lines = [line for line in str(error).splitlines() if line.strip()]
        return HostsTry(**known, error=lines[-1][:200] if lines else "no word")
    parameters = model_info(given.network).parameters
    if found["ranks"] != given.hosts or found.get("parameters", parameters) != parameters:
        return HostsTry(**known, error=f"{found['ranks']} ranks of {found.get('parameters', parameters):,} parameters")
    sent = statistics.median(after - first for after, first in zip(count(), before, strict=True))
    seconds = {name: found[name] for name in ("step_seconds", "compute_seconds")}
    return HostsTry(**known, **seconds, parameters=parameters, sent_bytes=sent / (given.steps + WARMUP_STEPS))


def head(given: argparse.Namespace) -> str:
    """What holds for all rows."""
    info = model_info(given.network)
    told = [
        f"{given.hosts} hosts of {os.cpu_count()} cores in all, links {given.rate or 'unshaped'}; {given.network}: "
        f"{info.parameters:,} parameters, {info.gradient_bytes / 1e6:.1f} MB of gradient; a wait of {given.seconds} s "
        f"is its computing; {given.tries} tries of {given.steps} steps: median (minimum to maximum)"
    ]
    if given.rate:
        share = 2 * (given.hosts - 1) / given.hosts * info.gradient_bytes
        ring_s = share / megabits(given.rate) / 125e3
        told.append(f"a ring alone: {share / 1e6:.1f} MB from each host, {ring_s:.3f} s at the links' rate")
    return "\n".join(told)


def rows(tries: Sequence[HostsTry]) -> list[str]:
    """Return each engine's row, with the ratio of hpcdl's engines to it within each try."""
    engines = list(dict.fromkeys(one.engine for one in tries))
    own = [engine for engine in engines if engine in OWN]
    ahead = [f"{name} / it: {what}" for name in own for what in ("step", "exposed")]
    cells = [["engine", "whole step, s", "exposed, s", "sent, MB", *ahead]]
    for engine in engines:
        every = {one.number: one for one in tries if one.engine == engine}
        good = [one for one in every.values() if not one.error]
        failed = next((f" ({len(good)} of {len(every)}: {one.error})" for one in every.values() if one.error), "")
        row = [LABELS[engine].replace("`", "") + failed]
        if good:
            row += [shown([one.step_seconds for one in good]), shown([one.exposed_seconds for one in good])]
            row += [tables.spread([one.sent_bytes / 1e6 for one in good], "{:.0f}".format)]
            row += ["" if name == engine else ratios(tries, name, good, of) for name in own for of in (_step, _exposed)]
        cells.append(row)
    widths = [max(len(row[place]) for row in cells if len(row) > place) for place in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in cells]


def _step(one: tables.Try) -> float:
    return one.step_seconds


def _exposed(one: tables.Try) -> float:
    return one.exposed_seconds


def ratios(tries: Sequence[HostsTry], name: str, others: Sequence[HostsTry], of: Callable[[tables.Try], float]) -> str:
    """Return the ratio of `name` to the others of the same try; empty if a value is lost in noise around zero."""
    own = {one.number: of(one) for one in tries if one.engine == name and not one.error}
    pairs = [(own[other.number], of(other)) for other in others if other.number in own]
    if not pairs or any(min(pair) <= 0 for pair in pairs):
        return ""
    return shown([above / below for above, below in pairs])


def shown(values: Sequence[float]) -> str:
    """Return median, minimum and maximum."""
    return tables.spread(values, "{:.3f}".format)


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments; raises UsageError if they are impossible."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message}; see `python -m benchmarks.peers_hosts --help`")

    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="benchmarks.peers_hosts", description=__doc__, formatter_class=raw)
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="1gbit", help="of each host's link each way, as tc spells it; '': unshaped")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help=f"of each kind in a try, after {WARMUP_STEPS} others")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--seconds", type=float, default=0.7, help="that computing lasts in a step")
    asked = parser.parse_args(words)
    asked.engines = asked.engines.split(",")
    for name in asked.engines:
        if name not in ENGINES:
            raise UnknownNameError("engine", name, ENGINES)
    model_info(asked.network)
    if not 2 <= asked.hosts < len(ADDRESSES) or min(asked.tries, asked.steps) < 1 or not 0 < asked.seconds <= 60:
        raise UsageError("--hosts is 2 to 64, --tries and --steps are 1 or more, --seconds is above 0, 60 at most")
    try:
        megabits(asked.rate or "1gbit")
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    return asked


def main(words: Sequence[str]) -> None:
    given = arguments(words)
    if problem := missing("hosts"):
        raise UsageError(problem)
    engines = EnginesOnHosts(given.engines)
    plan: Mapping[str, Any] = plan_of_waits(given.network, given.seconds) if {*given.engines} - {*OWN} else {}
    tries: list[HostsTry] = []
    with lab_folder() as folder:
        lab = Lab(folder, num_nodes=given.hosts, rate=given.rate)
        try:
            lab.start()
            (lab.shared / "waits.json").write_text(json.dumps(plan))
            for number in range(1, given.tries + 1):
                for engine in given.engines:
                    run = functools.partial(engines.run, engine, lab, given)
                    one = measure(engine, number, run, functools.partial(sent_bytes, lab), given)
                    told = one.error or f"{one.step_seconds:.3f} s a step, {one.exposed_seconds:.3f} s exposed"
                    print(f"try {number}: {engine}: {told}; load {one.load:.1f}", file=sys.stderr, flush=True)
                    tries.append(one)
        finally:
            lab.stop()
    print("\n".join([head(given), *rows(tries)]))
    if failed := [one for one in tries if one.error]:
        raise HpcdlError(f"{len(failed)} of {len(tries)} tries failed; above the table stands what their ranks said")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except HpcdlError as error:
        print(f"hpcdl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
