"""hpcdl beside Horovod, PyTorch DDP, MultiWorkerMirroredStrategy and a hand-written loop over MPI: `make peers`.

    python -m benchmarks.peers [--networks lenet,alexnet] [--engines auto,horovod] [--ranks 2] [--tries 5] [--out PAGE]

Every try runs each engine on each network in turn: two ranks, steps with and without exchange in turn in the same
processes. With `--ranks 1` one rank has all cores, and nothing is exchanged. Real-time priority is used if allowed,
so that other work on the machine waits. Horovod and PyTorch get their own environments in build/, which needs network
access once, and compilers for Horovod. Each finished try is kept in --journal; `--tables JOURNAL` makes the tables
from it again. An engine that fails gets a row that says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.peers import environment, tables
from benchmarks.peers.steps import LEARNING_RATE
from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec, launch_flags, launcher_of
from hpcdl.core.errors import HpcdlError, UnknownNameError, UsageError
from hpcdl.core.records.from_json import from_json
from hpcdl.core.units import counted
from hpcdl.models.table import model_info
from hpcdl.node.machines import read_topology

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ENVIRONMENT, JOURNAL = Path("build/peers-environment"), Path("build/peers-tries.jsonl")
PYTORCH_ENVIRONMENT = Path("build/peers-pytorch")
NETWORKS = {
    "lenet": (16, 200), "cifar10-quick": (100, 50), "alexnet": (16, 7), "vgg19": (2, 3), "googlenet": (8, 6),
    "resnet50": (8, 5), "hepcnn": (8, 4), "transformer": (8, 30), "lstm": (8, 15), "unet": (8, 15),
}  # fmt: skip
"""Batch per rank, and steps of each kind in a try."""
OWN_NETWORKS = {"transformer": 3_162_122, "lstm": 922_122, "unet": 488_210}
"""Trainable weights of networks that hpcdl does not know by name: functions of networks.py."""
LABELS = {
    "ring": "hpcdl `ring`", "auto": "hpcdl `auto`", "horovod": "Horovod", "pytorch-ddp": "PyTorch DDP",
    "grpc-ring": "MultiWorkerMirroredStrategy", "mpi-loop": "MPI loop by hand",
}  # fmt: skip
ALONE = ("auto", "horovod", "pytorch-ddp")
"""Engines that `--ranks 1` compares; hpcdl's strategy is then `single`."""
PATIENCE_S = 900.0
REAL_TIME = ("chrt", "-r", "5")
Line = tuple[list[str], Mapping[str, str]]
"""A command and its environment."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of one engine."""

    number: int
    network: str
    engine: str
    batch_size: int
    steps: int
    ranks: int = 2


def plan(
    networks: Sequence[str], engines: Sequence[str], num_tries: int, num_steps: int | None = None, num_ranks: int = 2
) -> list[Planned]:
    """Return every try of every network with every engine; engines vary fastest, then networks, then tries."""
    return [
        Planned(
            number=number, network=network, engine=engine, batch_size=NETWORKS[network][0],
            steps=num_steps or NETWORKS[network][1], ranks=num_ranks,
        )
        for number in range(1, num_tries + 1)
        for network in networks
        for engine in engines
    ]  # fmt: skip


class Engines:
    """How each engine is started; their environments are built before anything is measured."""

    def __init__(self, chosen: Sequence[str]) -> None:
        self._bare = dict(os.environ)
        self._own = find_mpiexec()
        self._horovod: list[str] = []
        self._horovod_environment = self._bare
        self._pytorch: Path | None = None
        if "pytorch-ddp" in chosen:
            self._pytorch = environment.with_pytorch(ROOT / PYTORCH_ENVIRONMENT, self._bare)
        if "horovod" in chosen:
            outside = {**self._bare, "PATH": without_own(self._bare.get("PATH", ""))}
            python = environment.with_horovod(ROOT / ENVIRONMENT, outside)
            mpiexec = shutil.which("mpiexec", path=outside["PATH"]) or "mpiexec"
            flavour, its_version = launcher_of(Path(mpiexec))
            self._horovod_mpi = f"{flavour} {its_version}"
            self._horovod = [mpiexec, *launch_flags(flavour), "-n"]
            self._horovod_rank = [str(python), str(HERE / "horovod_rank.py")]
            self._horovod_environment = {**outside, **environment_for(flavour)}

    def line(self, run: Planned) -> Line:
        """Return the command that prints the JSON of `run` on stdout."""
        ranks = str(run.ranks)
        amount = [run.network, str(run.batch_size), str(run.steps), ranks]
        if run.engine == "horovod":
            return [*self._horovod, ranks, *self._horovod_rank, *amount], self._horovod_environment
        if run.engine == "pytorch-ddp":
            flags = ["--standalone", "--nproc-per-node", ranks]
            line = [str(self._pytorch), "-m", "torch.distributed.run", *flags, str(HERE / "pytorch_rank.py"), *amount]
            return line, self._bare
        model = model_of(run.network)
        if run.engine == "mpi-loop":
            flags = launch_flags(self._own.flavour)
            line = [str(self._own.path), *flags, "-n", ranks, sys.executable, str(HERE / "mpi_rank.py"), model]
            line += amount[1:]
            return line, {**self._bare, **environment_for(self._own.flavour)}
        line = [
            sys.executable, "-m", "hpcdl", "bench", "step", "--model", model, "--batch-size", amount[1],
            "--ranks", ranks, "--strategy", run.engine if run.ranks > 1 else "single", "--steps", amount[2],
            "--learning-rate", str(LEARNING_RATE), "--allow-grpc", "--json",
        ]  # fmt: skip
        return line, self._bare

    def versions(self) -> str:
        """Return the measured versions for the page."""
        own = (
            f"hpcdl {version('hpcdl')} with TensorFlow {version('tensorflow')}, {self._own.flavour} {self._own.version}"
        )
        if self._horovod:
            own += f"; {environment.HOROVOD} with {environment.TENSORFLOW}, {self._horovod_mpi}"
        if self._pytorch:
            own += f"; torch=={environment.version_of(self._pytorch, 'torch', self._bare)} with gloo"
        return own


def without_own(path: str) -> str:
    """Return PATH without hpcdl's environment: Horovod is built with, and started by, the machine's MPI."""
    own = Path(sys.executable).parent
    return os.pathsep.join(folder for folder in path.split(os.pathsep) if Path(folder) != own)


def model_of(network: str) -> str:
    """Return the network's value for hpcdl's `--model`."""
    return f"{HERE / 'networks.py'}:{network}" if network in OWN_NETWORKS else network


def num_parameters(network: str) -> int:
    """Return the number of trainable weights that every engine's network must have."""
    return OWN_NETWORKS.get(network) or model_info(network).parameters


def priority(wanted: str) -> tuple[Sequence[str], str]:
    """Return the first words of commands, and a description of the priority."""
    if wanted == "real-time":
        try:
            if subprocess.run([*REAL_TIME, "true"], capture_output=True, check=False).returncode == 0:
                return REAL_TIME, "real-time priority"
        except OSError:
            pass
        return (), "ordinary priority, as real-time is not allowed there"
    return (), "ordinary priority"


def measure(run: Planned, line: Line, prefix: Sequence[str]) -> tables.Try:
    """Measure one try; any failure becomes its `error`, which the table shows."""
    load = os.getloadavg()[0]
    given = dataclasses.asdict(run) | {"load": load}
    command, its_environment = line
    try:
        finished = subprocess.run(
            [*prefix, *command], env=its_environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return tables.Try(**given, error=f"not over after {PATIENCE_S:.0f} s")
    if finished.returncode:
        told = [text for text in finished.stderr.splitlines() if text.strip()]
        return tables.Try(**given, error=f"exit code {finished.returncode}: {told[-1][:200] if told else 'no word'}")
    return answered(given, finished.stdout)


def answered(given: Mapping[str, Any], stdout: str) -> tables.Try:
    """Return the try in an engine's JSON, which may be among other lines."""
    try:
        found = json.JSONDecoder().raw_decode(stdout, stdout.index("{"))[0]
        known = {field.name for field in dataclasses.fields(tables.Try)} - set(given)
        told = {name: value for name, value in found.items() if name in known and value is not None}
        one = tables.Try(**given, **told)
    except (ValueError, AttributeError, TypeError):
        return tables.Try(**given, error=f"no result in {stdout[-100:]!r}")
    wanted = num_parameters(one.network)
    if one.parameters and one.parameters != wanted:
        return tables.Try(**given, error=f"another network: {one.parameters:,} parameters, not {wanted:,}")
    if found.get("ranks", one.ranks) != one.ranks or not one.step_seconds > 0:
        return tables.Try(**given, error=f"no step of {counted(one.ranks, 'rank')} was measured")
    return one


def run_all(runs: Sequence[Planned], line_of: Callable[[Planned], Line], prefix: Sequence[str]) -> Iterator[tables.Try]:
    """Yield each try when it ends, and report it on stderr."""
    for place, run in enumerate(runs, 1):
        one = measure(run, line_of(run), prefix)
        exposed = f", {tables.ms(one.exposed_seconds)} ms exposed" if run.ranks > 1 else ""
        told = one.error or f"{tables.ms(one.step_seconds)} ms a step{exposed}"
        print(f"{place}/{len(runs)} try {run.number}: {run.network}, {run.engine}: {told}", file=sys.stderr, flush=True)
        yield one


def head(command: Sequence[str], versions: str, its_priority: str) -> tables.Head:
    """Return machine, date and the other facts common to all tries."""
    topology = read_topology()
    memory_gib = sum(node.memory_bytes for node in topology.numa_nodes) / 2**30
    return tables.Head(
        machine=f"{topology.processor}, {len(topology.usable_cores)} cores, {memory_gib:.0f} GiB",
        versions=versions,
        command=" ".join(["python -m benchmarks.peers", *command]),
        date=time.strftime("%Y-%m-%d"),
        priority=its_priority,
    )


def kept(journal: Path) -> tuple[tables.Head, list[tables.Try]]:
    """Return the content of a journal, without a truncated last line."""
    documents = []
    try:
        lines = journal.read_text().splitlines()
    except OSError as error:
        raise UsageError(f"no journal of tries: {journal}: {error.strerror}; `make peers` writes one") from error
    for line in lines:
        try:
            documents.append(json.loads(line))
        except ValueError:
            break
    if len(documents) < 2:
        raise UsageError(f"{journal} holds no try")
    return from_json(tables.Head, documents[0]), [from_json(tables.Try, document) for document in documents[1:]]


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments; raises UsageError if they are impossible."""

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message}; see `python -m benchmarks.peers --help`")

    parser = Parser(prog="benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--engines")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=2)
    parser.add_argument("--tries", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of each kind in a try; by default as many as suit the network")
    parser.add_argument("--priority", choices=("real-time", "normal"), default="real-time")
    parser.add_argument("--out", type=Path, help="page with the markers to write the tables between")
    parser.add_argument("--journal", type=Path, default=JOURNAL)
    parser.add_argument("--tables", type=Path, metavar="JOURNAL", help="measure nothing")
    asked = parser.parse_args(words)
    engines = ALONE if asked.ranks == 1 else tuple(LABELS)
    asked.networks, asked.engines = asked.networks.split(","), (asked.engines or ",".join(engines)).split(",")
    for kind, given, known in (("network", asked.networks, NETWORKS), ("engine", asked.engines, engines)):
        for name in given:
            if name not in known:
                raise UnknownNameError(kind, name, known)
    if asked.tries < 1 or (asked.steps is not None and asked.steps < 1):
        raise UsageError("--tries and --steps are 1 or more")
    if asked.out and not asked.out.is_file():
        raise UsageError(f"--out {asked.out} is not a file; its tables stand between {tables.BEGIN} and {tables.END}")
    return asked


def main(words: Sequence[str]) -> None:
    asked = arguments(words)
    if not asked.tables:
        engines = Engines(asked.engines)
        prefix, its_priority = priority(asked.priority)
        runs = plan(asked.networks, asked.engines, asked.tries, asked.steps, asked.ranks)
        asked.journal.parent.mkdir(parents=True, exist_ok=True)
        with asked.journal.open("w") as journal:
            told = head(words, engines.versions(), its_priority)
            for record in itertools.chain([told], run_all(runs, engines.line, prefix)):
                print(json.dumps(dataclasses.asdict(record)), file=journal, flush=True)
    its_head, tries = kept(asked.tables or asked.journal)
    text = tables.section(its_head, LABELS, tries)
    print(text)
    if asked.out:
        tables.put(text, asked.out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except HpcdlError as error:
        print(f"hpcdl: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("hpcdl: stopped by Ctrl-C; --tables makes the tables of what was measured", file=sys.stderr)
        sys.exit(130)
