"""The batch systems: their commands, the directives of their scripts, and the state of a job."""

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
"""A busy controller answers late; one that does not answer in this time is down."""


@dataclass(frozen=True, kw_only=True)
class NodeWishes:
    """What a job requires of its nodes, in the batch system's own terms; empty for its default.

    `cpus_per_task` are the CPUs of each rank. `options` are passed on unchanged, one per line.
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
    """A job to submit: `command` are the words after `hpcdl`; `folder` (absolute) is for script and log.

    The ranks are warned `warning_s` before the limit. With `until_done` the job requeues itself, `max_requeues` times
    at most, as long as it ends with 75 (something to resume). `outlives_nodes`: the job continues without a lost node.
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
class InQueue:
    """A job in the batch system: its state in one word, and why it waits, in the system's own words."""

    state: str
    reason: str = ""

    @property
    def never_starts(self) -> bool:
        """Whether the job waits for what its partition or account does not have."""
        return self.state in WAITING and _NEVER.fullmatch(self.reason) is not None


WAITING = ("pending", "held", "configuring", "suspended", "requeued", "requeue_hold")
"""States with a reason."""
_NEVER = re.compile(r"Partition(Config|TimeLimit|NodeLimit)|BadConstraints|(Assoc|QOS)Max\w+PerJob(Limit)?")
"""Slurm's reasons that waiting does not end: the job asks for more than its partition or account may have."""
ENDED = ("completed", "failed", "cancelled", "timeout", "deadline", "out_of_memory", "revoked")
"""Final states of a job. A job that lost its node or was preempted may return by itself, so these are not included."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A batch system: its commands, and the directives of its scripts."""

    name: str
    submit: Sequence[str]
    number: re.Pattern[str]
    directives: Callable[[JobRequest], list[str]]
    look: Callable[[str], InQueue]
    cancel: Callable[[str], Sequence[str]]
    job_variable: str
    """The variable in which a job's processes find the job's number."""
    is_exclusive: Callable[[str], bool]
    """Whether no other user's job can be on the nodes of a running job."""
    cpus_of_node: Callable[[str], int | None]
    """The CPUs of the smallest node of a partition, or of the default one; None if the system does not tell."""
    reads_stdin: bool = False
    """Whether a script is passed on stdin, because directives in a file would not be read."""

    def state(self, number: str) -> str:
        """Return the job's state in one word, `unknown` if the system does not know the job."""
        return self.look(number).state


def call(line: Sequence[str], stdin: str = "") -> str:
    """Return the output of a batch system's command. Raises HpcdlError with its last error line if it fails."""
    try:
        answer = subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HpcdlError(f"`{line[0]}` does not answer ({error}); is the batch system up?") from error
    if answer.returncode:
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        raise HpcdlError(f"`{shlex.join(line[:2])}` failed: {last}")
    return answer.stdout


def _slurm_directives(request: JobRequest) -> list[str]:
    minutes = max(-(-int(request.time_s) // 60), 1)
    log = str(request.folder).replace("%", "%%") + "/log-%j.txt"  # sbatch replaces %j and others in a path
    options = [
        f"--job-name={_quoted(request.name)}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.ranks_per_node}",
        f"--time={minutes}",
        f"--signal=USR1@{int(request.warning_s)}",  # to the ranks, not to the script
        f"--output={_quoted(log)}",
        "--open-mode=append",  # a requeued job would otherwise empty its log
        "--requeue" if request.until_done else "--no-requeue",
    ]
    options += ["--no-kill"] if request.outlives_nodes else []  # otherwise Slurm ends the job with its first lost node
    options += [f"--partition={_quoted(request.partition)}"] if request.partition else []
    options += [f"--account={_quoted(request.account)}"] if request.account else []
    wanted = request.nodes_wanted
    if re.fullmatch("[1-9][0-9]{0,2}", wanted.mem):  # TensorFlow alone takes 1 GB; 0 is all memory of a node
        raise UsageError(f"--mem {wanted.mem}: Slurm takes it as {wanted.mem} MB; write {wanted.mem}G or {wanted.mem}M")
    options += [f"--cpus-per-task={wanted.cpus_per_task}"] if wanted.cpus_per_task else []
    options += ["--exclusive"] if wanted.exclusive else []
    options += [f"--{name}={_quoted(value)}" for name in _SLURM_OPTIONS if (value := getattr(wanted, name))]
    handed = [_handed_through(option, _SLURM_OWN) for option in wanted.options]
    return [f"#SBATCH {option}" for option in (*options, *handed)]


_SLURM_OPTIONS = ("mem", "qos", "constraint", "gres", "exclude")
_OWN = "submit sets it itself; leave it out"
_ARRAY = (
    "each job of an array would write the same run directory; `hpcdl sweep STUDY.toml --jobs` submits a job for each "
    "number of nodes"
)
_SLURM_OWN = {
    **{f"--{name}": f"type --{name}" for name in (*_SLURM_OPTIONS, "nodes", "time", "partition", "account")},
    "--cpus-per-task": "type --cpus-per-task", "--exclusive": "type --exclusive",
    "-N": "type --nodes", "-t": "type --time", "-p": "type --partition", "-A": "type --account",
    "-c": "type --cpus-per-task", "-q": "type --qos", "-C": "type --constraint", "-x": "type --exclude",
    "-J": "type --name", "--job-name": "type --name", "--ntasks-per-node": "type --ranks-per-node",
    "--requeue": "type --until-done", "--no-requeue": "type --until-done", "-n": _OWN, "--ntasks": _OWN,
    "-o": _OWN, "--output": _OWN, "--signal": _OWN, "--open-mode": _OWN, "-a": _ARRAY, "--array": _ARRAY,
}  # fmt: skip
"""The flag of hpcdl with the same meaning, by option of sbatch: the option would silently override that flag."""
_PBS_OWN = {
    "-N": "type --name", "-q": "type --partition", "-A": "type --account", "-l walltime": "type --time",
    "-l select": "type --nodes, --ranks-per-node, --cpus-per-task, --mem or --gres", "-l nodes": "type --nodes",
    "-l place": "type --exclusive", "-j": _OWN, "-r": _OWN, "-J": _ARRAY,
}  # fmt: skip


def _names_in(option: str) -> list[str]:
    """Return the names in an option; for PBS's `-l a=1,b=2`, one per resource."""
    if option.startswith("--"):
        return [re.split(r"[= ]", option)[0]]
    name, text = option[:2], option[2:].strip()
    return [f"-l {part.partition('=')[0].strip()}" for part in text.split(",")] if name == "-l" else [name]


def _handed_through(option: str, refusals: Mapping[str, str], names_in: Callable[[str], list[str]] = _names_in) -> str:
    """Return an option of the batch system. Raises UsageError if it is invalid, of several lines or in `refusals`."""
    flag = f"--batch-option {option!r}"
    if not option.startswith("-") or not option.isprintable():
        raise UsageError(f"{flag}: give one option of the batch system, as --batch-option=--nice=100")
    for name in names_in(option):
        # sbatch also accepts the beginning of a long option.
        meant = [key for key in refusals if key == name or (name.startswith("--") and key.startswith(name))]
        if meant:
            raise UsageError(f"{flag}: {refusals[meant[0]]}")
    return option


def _quoted(text: str) -> str:
    """Quote for sbatch's parser of #SBATCH lines, which knows quotes as the shell does, and comments with #."""
    return shlex.quote(text)


def _pbs_directives(request: JobRequest) -> list[str]:
    if request.until_done:
        raise UsageError(
            "--until-done: a PBS job cannot requeue itself; submit again with the same --run-dir and --resume"
        )
    wanted = request.nodes_wanted
    for what in ("qos", "exclude"):
        if getattr(wanted, what):
            raise UsageError(f"--{what} is Slurm's; leave it out, or say it in PBS's words with --batch-option")
    for what in ("constraint", "gres"):
        if not re.fullmatch(r"([A-Za-z]\w*=[\w.@+-]+(:(?=.))?)*", value := getattr(wanted, what)):
            raise UsageError(f"--{what} {value!r}: PBS takes resources of a node there, such as ngpus=4")
    if wanted.mem and not re.fullmatch(r"[0-9]+(\.[0-9]+)?[kmgtKMGT][bB]?", wanted.mem):  # without a unit: bytes
        raise UsageError(f"--mem {wanted.mem!r}: PBS takes a number with a unit, such as 64gb")
    for what, value in (("partition", request.partition), ("account", request.account)):
        if re.search(r"[^\w.@+-]", value):
            raise UsageError(f"--{what} {value!r}: PBS takes letters, digits and . _ - + @ there")
    hours, rest_s = divmod(int(request.time_s), 3600)
    options = [
        f"-N {re.sub(r'[^A-Za-z0-9_.-]', '_', request.name)[:15]}",  # older versions of PBS take 15 characters
        f"-l select={request.nodes}:{_pbs_chunk(request)}",
        f"-l walltime={hours:02d}:{rest_s // 60:02d}:{rest_s % 60:02d}",
        "-j oe",
        "-r n",
    ]
    options += [f"-q {request.partition}"] if request.partition else []
    options += [f"-A {request.account}"] if request.account else []
    # Each chunk on a separate node: otherwise PBS may pack all of them on one.
    options += ["-l place=scatter:excl" if wanted.exclusive else "-l place=scatter"]
    handed = [_handed_through(option, _PBS_OWN) for option in wanted.options]
    return [f"#PBS {option}" for option in (*options, *handed)]


def _pbs_chunk(request: JobRequest) -> str:
    """Return the resources of each node."""
    wanted, ranks = request.nodes_wanted, request.ranks_per_node
    cpus = [f"ncpus={wanted.cpus_per_task * ranks}"] if wanted.cpus_per_task else []
    resources = [part for part in (wanted.mem and f"mem={wanted.mem}", wanted.gres, wanted.constraint) if part]
    return ":".join([*cpus, f"mpiprocs={ranks}", *resources])


def _flux_directives(request: JobRequest) -> list[str]:
    """Return directives that `flux batch` parses like a shell. Without --cpus-per-task the job gets whole nodes."""
    if request.until_done:
        raise UsageError(
            "--until-done: a Flux job cannot requeue itself; submit again with the same --run-dir and --resume"
        )
    wanted = request.nodes_wanted
    for what in ("mem", "qos", "gres", "exclude"):
        if getattr(wanted, what):
            raise UsageError(f"--{what}: Flux has no such option; leave it out, or say it with --batch-option")
    minutes = max(-(-int(request.time_s) // 60), 1)
    log = f"{request.folder}/log-{{{{id}}}}.txt"
    options = [
        f"--job-name={_quoted(request.name)}",
        f"--nodes={request.nodes}",
        f"--time-limit={minutes}m",
        f"--output={_quoted(log)}",
    ]
    if wanted.cpus_per_task:
        slots = request.nodes * request.ranks_per_node
        options += [f"--nslots={slots}", f"--cores-per-slot={wanted.cpus_per_task}"]
    options += ["--exclusive"] if wanted.exclusive or not wanted.cpus_per_task else []
    options += [f"--queue={_quoted(request.partition)}"] if request.partition else []
    options += [f"--bank={_quoted(request.account)}"] if request.account else []
    options += [f"--requires={_quoted(wanted.constraint)}"] if wanted.constraint else []
    handed = [_handed_through(option, _FLUX_OWN) for option in wanted.options]
    return [f"# flux: {option}" for option in (*options, *handed)]


_FLUX_OWN = {
    "--nodes": "type --nodes", "-N": "type --nodes", "--time-limit": "type --time", "-t": "type --time",
    "--queue": "type --partition", "-q": "type --partition", "--bank": "type --account", "-B": "type --account",
    "--cores-per-slot": "type --cpus-per-task", "-c": "type --cpus-per-task", "--exclusive": "type --exclusive",
    "-x": "type --exclusive", "--requires": "type --constraint", "--job-name": "type --name",
    "--nslots": _OWN, "-n": _OWN, "--output": _OWN, "--wrap": _OWN,
}  # fmt: skip


def _in_flux(number: str) -> InQueue:
    """Return the answer of `flux jobs`: a status, and the reason why the job waits, if the scheduler gives one."""
    try:
        lines = call(["flux", "jobs", "-no", "{status} {sched.reason_pending}", number]).splitlines()
    except HpcdlError:
        return InQueue(state="unknown")
    status, _, reason = (lines[0].strip() if lines else "UNKNOWN").partition(" ")
    state = {"CANCELED": "cancelled"}.get(status, status.lower())
    return InQueue(state=state, reason=reason.strip() if state in WAITING else "")


def _lsf_directives(request: JobRequest) -> list[str]:
    """Return directives that `bsub` parses like a shell. A rank gets --cpus-per-task slots: one per core."""
    if request.until_done:
        raise UsageError(
            "--until-done: an LSF job does not requeue itself; submit again with the same --run-dir and --resume"
        )
    wanted = request.nodes_wanted
    for what, instead in _LSF_REFUSED.items():
        if getattr(wanted, what):
            raise UsageError(f"--{what}: LSF has no such option; say it in its words with {instead}")
    if re.search(r"[\"`$\\]", wanted.constraint):
        raise UsageError(f'--constraint {wanted.constraint!r}: LSF takes a select string without " $ ` and \\ there')
    for host in filter(None, wanted.exclude.split(",")):
        if not re.fullmatch(r"[\w.-]+", host):
            raise UsageError(f"--exclude {wanted.exclude!r}: LSF takes names of hosts, as n1,n2")
    hours, minutes = divmod(max(-(-int(request.time_s) // 60), 1), 60)
    slots = request.ranks_per_node * (wanted.cpus_per_task or 1)
    options = [
        f"-J {re.sub(r'[^A-Za-z0-9_.-]', '_', request.name)}",
        f"-n {request.nodes * slots}",
        f'-R "span[ptile={slots}]"',
        f"-W {hours}:{minutes:02d}",
        "-o /dev/null",  # the script writes its own log; otherwise LSF would mail the output
        "-rn",
    ]
    hosts = [f"hname!='{host}'" for host in wanted.exclude.split(",") if host]
    chosen = [*([f"({wanted.constraint})"] if wanted.constraint else []), *hosts]
    options += [f'-R "select[{" && ".join(chosen)}]"'] if chosen else []
    options += ["-x"] if wanted.exclusive else []
    options += [f"-q {_quoted(request.partition)}"] if request.partition else []
    options += [f"-P {_quoted(request.account)}"] if request.account else []
    handed = [_handed_through(option, _LSF_OWN, _lsf_names) for option in wanted.options]
    return [f"#BSUB {option}" for option in (*options, *handed)]


_LSF_REFUSED = {
    "mem": "--batch-option='-R \"rusage[mem=64GB]\"', per slot or host, as the site sets it",
    "qos": "--batch-option='-sla NAME'",
    "gres": "--batch-option='-gpu \"num=4\"'",
}
_LSF_OWN = {
    "-J": "type --name; " + _ARRAY, "-n": "type --nodes and --ranks-per-node", "-W": "type --time",
    "-q": "type --partition", "-P": "type --account", "-x": "type --exclusive",
    "-o": _OWN, "-oo": _OWN, "-r": _OWN, "-rn": _OWN,
}  # fmt: skip


def _lsf_names(option: str) -> list[str]:
    """Return the name of an option of bsub: a word after a dash (`-outdir`), or a letter before a number (`-n4`)."""
    match = re.match(r"-[A-Za-z](?=\d)|\S+", option)
    return [match[0]] if match else []


def _in_lsf(number: str) -> InQueue:
    """Return the state by bjobs; for a waiting job also the first reason of `bjobs -p`, below the job's line."""
    try:
        status = call(["bjobs", "-noheader", "-o", "stat", number]).strip()
    except HpcdlError:
        return InQueue(state="unknown")
    state = _LSF_STATES.get(status, status.lower() or "unknown")
    if state not in WAITING:
        return InQueue(state=state)
    with contextlib.suppress(HpcdlError):
        reasons = [line.strip().rstrip(";") for line in call(["bjobs", "-p", number]).splitlines()[2:]]
        return InQueue(state=state, reason=next(filter(None, reasons), ""))
    return InQueue(state=state)


_LSF_STATES = {
    "PEND": "pending", "RUN": "running", "DONE": "completed", "EXIT": "failed", "PSUSP": "held",
    "USUSP": "suspended", "SSUSP": "suspended", "PROV": "configuring", "WAIT": "pending", "UNKWN": "unknown",
    "ZOMBI": "unknown",
}  # fmt: skip


def _in_slurm(number: str) -> InQueue:
    """Return the state by squeue, or by sacct if squeue has forgotten the job; `unknown` if neither knows it."""
    for line in (
        ["squeue", "--noheader", "--states=all", "--jobs", number, "--format=%T %r"],
        ["sacct", "--noheader", "--parsable2", "--allocations", "--jobs", number, "--format=State"],
    ):
        try:
            lines = call(line).splitlines()[:1]
        except HpcdlError:
            continue
        if lines and lines[0].strip():
            state, _, reason = lines[0].strip().partition(" ")
            waits = state.lower() in WAITING and reason != "None"
            return InQueue(state=state.lower(), reason=reason if waits else "")
    return InQueue(state="unknown")


def _in_pbs(number: str) -> InQueue:
    """Return the state by qstat; a comment continues in lines that begin with a tab."""
    states = {"Q": "pending", "R": "running", "E": "completing", "F": "completed", "H": "held", "X": "completed"}
    answer = re.sub(r"\n\t", "", call(["qstat", "-x", "-f", number]))
    match = re.search(r"job_state = (\w)", answer)
    if not match:
        return InQueue(state="unknown")
    state, comment = states.get(match[1], match[1]), re.search(r"^\s*comment = (.*)$", answer, re.MULTILINE)
    return InQueue(state=state, reason=comment[1].strip() if comment and state in WAITING else "")


def _slurm_is_exclusive(number: str) -> bool:
    """Return whether OverSubscribe is NO (`--exclusive`, whole nodes) or USER (`--exclusive=user`); OK shares nodes."""
    match = re.search(r"\bOverSubscribe=(\w+)", call(["scontrol", "--oneliner", "show", "job", number]))
    return match is not None and match[1] in ("NO", "USER")


def _pbs_is_exclusive(number: str) -> bool:
    """Return whether the job was placed with `excl` or `exclhost`, alone or after a colon as in `scatter:excl`."""
    return re.search(r"Resource_List\.place = (\S*:)?excl(host)?\b", call(["qstat", "-f", number])) is not None


def _lsf_is_exclusive(number: str) -> bool:
    """Return whether `bjobs -l` names the job as submitted with `bsub -x`."""
    return re.search(r"Exclusive Execution", re.sub(r"\n\s*", " ", call(["bjobs", "-l", number]))) is not None


def _slurm_cpus(partition: str) -> int | None:
    """Return the smallest `%c` of `sinfo` (`4+` means 4 or more); the default partition's name ends with `*`."""
    with contextlib.suppress(HpcdlError):
        chosen = [f"--partition={partition}"] if partition else []
        lines = [
            fields
            for line in call(["sinfo", "--noheader", *chosen, "--format=%P %c"]).splitlines()
            if len(fields := line.split()) == 2
        ]
        of_partition = lines if partition else [fields for fields in lines if fields[0].endswith("*")] or lines
        counts = [int(count.rstrip("+")) for _, count in of_partition if count.rstrip("+").isdigit()]
        return min(counts, default=None)
    return None


SYSTEMS: Mapping[str, System] = {
    "slurm": System(
        name="slurm", submit=("sbatch", "--parsable"), number=re.compile(r"^(\d+)"), directives=_slurm_directives,
        look=_in_slurm, cancel=lambda number: ["scancel", number],
        job_variable="SLURM_JOB_ID", is_exclusive=_slurm_is_exclusive, cpus_of_node=_slurm_cpus,
    ),
    "pbs": System(
        name="pbs", submit=("qsub",), number=re.compile(r"^(\d+\S*)"), directives=_pbs_directives,
        look=_in_pbs, cancel=lambda number: ["qdel", number],
        job_variable="PBS_JOBID", is_exclusive=_pbs_is_exclusive, cpus_of_node=lambda _: None,
    ),
    "flux": System(
        name="flux", submit=("flux", "batch"), number=re.compile(r"^([ƒf]\w+|\d+)", re.MULTILINE),
        directives=_flux_directives, look=_in_flux, cancel=lambda number: ["flux", "cancel", number],
        # Flux removes the job's number from the environment of its script, and does not say who owns the nodes.
        job_variable="FLUX_URI", is_exclusive=lambda _: False, cpus_of_node=lambda _: None,
    ),
    "lsf": System(
        name="lsf", submit=("bsub",), number=re.compile(r"^Job <(\d+)> is submitted", re.MULTILINE),
        directives=_lsf_directives, look=_in_lsf, cancel=lambda number: ["bkill", number],
        job_variable="LSB_JOBID", is_exclusive=_lsf_is_exclusive, cpus_of_node=lambda _: None, reads_stdin=True,
    ),
}  # fmt: skip


def find_system(name: str) -> System:
    """Return the batch system called `name`. Raises UnknownNameError."""
    if name not in SYSTEMS:
        raise UnknownNameError("batch system", name, SYSTEMS)
    return SYSTEMS[name]


def has_own_nodes(environment: Mapping[str, str]) -> bool:
    """Return whether this process's job shares its nodes with no other user; False if no batch system confirms that."""
    for system in SYSTEMS.values():
        if system.job_variable in environment:
            with contextlib.suppress(HpcdlError):
                return system.is_exclusive(environment[system.job_variable])
    return False
