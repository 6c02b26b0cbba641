"""The batch systems: their commands, how their scripts begin, and what they say of a job."""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.core.errors import HpcdlError, UnknownNameError, UsageError

TIMEOUT_S = 60.0
"""A controller that is busy answers late; one that does not answer in this time is down."""


@dataclass(frozen=True, kw_only=True)
class NodeWishes:
    """What a job asks of its nodes, in the batch system's own words; empty: its default.

    `cpus_per_task` are the CPUs of each rank. `options` are handed through as they are, one to a line.
    """

    cpus_per_task: int | None = None
    exclusive: bool = False
    mem: str = ""
    qos: str = ""
    constraint: str = ""
    gres: str = ""
    exclude: str = ""
    options: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """A job to be: `command` are words behind `hpcdl`; `folder` (absolute) takes script and log.

    `warning_s` before the limit the ranks are warned. With `until_done` the job requeues itself, `max_requeues` times
    at most, for as long as it ends with 75 (something to resume). `outlives_nodes`: the job goes on without a node that
    is lost.
    """

    name: str
    command: Sequence[str]
    folder: Path
    nodes: int
    ranks_per_node: int
    time_s: float
    warning_s: float
    partition: str = ""
    account: str = ""
    until_done: bool = False
    max_requeues: int = 20
    launcher: str = ""
    outlives_nodes: bool = False
    nodes_wanted: NodeWishes = NodeWishes()


@dataclass(frozen=True, kw_only=True)
class System:
    """A batch system: its commands, and how its script begins."""

    name: str
    submit: Sequence[str]
    number: re.Pattern[str]
    directives: Callable[[JobRequest], list[str]]
    state: Callable[[str], str]
    cancel: Callable[[str], Sequence[str]]
    job_variable: str
    """What a job's processes find their job's number in."""
    is_exclusive: Callable[[str], bool]
    """Whether no other user's job can be on the nodes of a running job."""
    cpus_of_node: Callable[[str], int | None]
    """CPUs of the smallest node of a partition, or of the default one; None where it does not say."""


def call(line: Sequence[str]) -> str:
    """What a command of the batch system prints; HpcdlError with its own last word where it fails."""
    try:
        answer = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HpcdlError(f"`{line[0]}` does not answer ({error}); is the batch system up?") from error
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        raise HpcdlError(f"`{shlex.join(line[:2])}` failed: {last}")
    return answer.stdout


def _slurm_directives(request: JobRequest) -> list[str]:
    minutes = max(-(-int(request.time_s) // 60), 1)
    log = str(request.folder).replace("%", "%%") + "/log-%j.txt"
    options = [
        f"--job-name={_quoted(request.name)}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.ranks_per_node}",
        f"--time={minutes}",
        f"--signal=USR1@{int(request.warning_s)}",  # to the ranks, not to the script
        f"--output={_quoted(log)}",
        "--open-mode=append",
        "--requeue" if request.until_done else "--no-requeue",
    ]
    options += ["--no-kill"] if request.outlives_nodes else []
    options += [f"--partition={_quoted(request.partition)}"] if request.partition else []
    options += [f"--account={_quoted(request.account)}"] if request.account else []
    wanted = request.nodes_wanted
    options += [f"--cpus-per-task={wanted.cpus_per_task}"] if wanted.cpus_per_task else []
    options += ["--exclusive"] if wanted.exclusive else []
    options += [f"--{name}={_quoted(value)}" for name in _SLURM_WISHES if (value := getattr(wanted, name))]
    return [f"#SBATCH {option}" for option in (*options, *map(_handed_through, wanted.options))]


_SLURM_WISHES = ("mem", "qos", "constraint", "gres", "exclude")


def _handed_through(option: str) -> str:
    """An option of the batch system itself; UsageError for what is none, or would be a second line."""
    if not option.startswith("-") or not option.isprintable():
        raise UsageError(
            f"--batch-option {option!r}: give one option of the batch system, as --batch-option=--nice=100"
        )
    return option


def _quoted(text: str) -> str:
    """For sbatch's reader of #SBATCH lines, which knows quotes as the shell does, and where # starts a comment."""
    return shlex.quote(text)


def _pbs_directives(request: JobRequest) -> list[str]:
    if request.until_done:
        raise UsageError(
            "--until-done: a PBS job cannot requeue itself; submit again with the same --run-dir and --resume"
        )
    wanted = request.nodes_wanted
    for what in ("qos", "constraint", "gres", "exclude"):
        if getattr(wanted, what):
            raise UsageError(f"--{what} is Slurm's; PBS takes --batch-option, such as --batch-option='-l ngpus=1'")
    if wanted.mem and not re.fullmatch(r"[0-9]+(\.[0-9]+)?[kmgtKMGT]?[bB]?", wanted.mem):
        raise UsageError(f"--mem {wanted.mem!r}: PBS takes a number with a unit, such as 64gb")
    for what, value in (("partition", request.partition), ("account", request.account)):
        if re.search(r"[^\w.@+-]", value):
            raise UsageError(f"--{what} {value!r}: PBS takes letters, digits and . _ - + @ there")
    hours, rest = divmod(int(request.time_s), 3600)
    options = [
        f"-N {re.sub(r'[^A-Za-z0-9_.-]', '_', request.name)[:15]}",
        f"-l select={request.nodes}:{_pbs_chunk(request)}",
        f"-l walltime={hours:02d}:{rest // 60:02d}:{rest % 60:02d}",
        "-j oe",
        "-r n",
    ]
    options += [f"-q {request.partition}"] if request.partition else []
    options += [f"-A {request.account}"] if request.account else []
    options += ["-l place=scatter:excl"] if wanted.exclusive else []
    return [f"#PBS {option}" for option in (*options, *map(_handed_through, wanted.options))]


def _pbs_chunk(request: JobRequest) -> str:
    """What each node gives."""
    wanted, ranks = request.nodes_wanted, request.ranks_per_node
    cpus = [f"ncpus={wanted.cpus_per_task * ranks}"] if wanted.cpus_per_task else []
    return ":".join([*cpus, f"mpiprocs={ranks}", *([f"mem={wanted.mem}"] if wanted.mem else [])])


def _slurm_state(number: str) -> str:
    """One word of squeue, of sacct where squeue has forgotten the job, or `unknown`."""
    for line in (
        ["squeue", "--noheader", "--states=all", "--jobs", number, "--format=%T"],
        ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", number, "--format=State"],
    ):
        try:
            words = call(line).split()
        except HpcdlError:
            continue
        if words:
            return words[0].lower()
    return "unknown"


def _pbs_state(number: str) -> str:
    words = {"Q": "pending", "R": "running", "E": "completing", "F": "completed", "H": "held", "X": "completed"}
    found = re.search(r"job_state = (\w)", call(["qstat", "-x", "-f", number]))
    return words.get(found[1], found[1]) if found else "unknown"


def _slurm_is_exclusive(number: str) -> bool:
    """`--exclusive` and partitions of whole nodes say NO, `--exclusive=user` says USER; OK, the default, shares."""
    found = re.search(r"\bOverSubscribe=(\w+)", call(["scontrol", "--oneliner", "show", "job", number]))
    return found is not None and found[1] in ("NO", "USER")


def _pbs_is_exclusive(number: str) -> bool:
    """`-l place=excl` and `exclhost`, alone or behind a colon as in `scatter:excl`."""
    return re.search(r"Resource_List\.place = (\S*:)?excl(host)?\b", call(["qstat", "-f", number])) is not None


def _slurm_cpus(partition: str) -> int | None:
    """Of `sinfo`'s `%c`, which writes `4+` where nodes have 4 and more; the default partition's name ends with `*`."""
    with contextlib.suppress(HpcdlError):
        chosen = [f"--partition={partition}"] if partition else []
        lines = [
            words
            for line in call(["sinfo", "--noheader", *chosen, "--format=%P %c"]).splitlines()
            if len(words := line.split()) == 2
        ]
        own = lines if partition else [words for words in lines if words[0].endswith("*")] or lines
        counts = [int(count.rstrip("+")) for _, count in own if count.rstrip("+").isdigit()]
        return min(counts, default=None)
    return None


SYSTEMS: Mapping[str, System] = {
    "slurm": System(
        name="slurm", submit=("sbatch", "--parsable"), number=re.compile(r"^(\d+)"), directives=_slurm_directives,
        state=_slurm_state, cancel=lambda number: ["scancel", number],
        job_variable="SLURM_JOB_ID", is_exclusive=_slurm_is_exclusive, cpus_of_node=_slurm_cpus,
    ),
    "pbs": System(
        name="pbs", submit=("qsub",), number=re.compile(r"^(\d+\S*)"), directives=_pbs_directives,
        state=_pbs_state, cancel=lambda number: ["qdel", number],
        job_variable="PBS_JOBID", is_exclusive=_pbs_is_exclusive, cpus_of_node=lambda _: None,
    ),
}  # fmt: skip


def find_system(name: str) -> System:
    """The batch system called `name`."""
    if name not in SYSTEMS:
        raise UnknownNameError("batch system", name, SYSTEMS)
    return SYSTEMS[name]


def has_own_nodes(environment: Mapping[str, str]) -> bool:
    """Whether this process is in a job whose nodes are its user's alone; False where no batch system can say so."""
    for system in SYSTEMS.values():
        if system.job_variable in environment:
            with contextlib.suppress(HpcdlError):
                return system.is_exclusive(environment[system.job_variable])
    return False
