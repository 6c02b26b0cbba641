"""From a request to `hpcdl submit` to a job: fill in run folder, ranks and warning, submit, and store the job."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.cluster.batch import jobs
from hpcdl.cluster.batch.script import batch_launcher, render, submit
from hpcdl.cluster.batch.systems import SYSTEMS, JobRequest, NodeWishes
from hpcdl.cluster.launchers import LAUNCHER_VARIABLE, load_launcher
from hpcdl.config.commands import BATCH_KEYS, BatchConfig, SubmitConfig
from hpcdl.config.forms import is_trace_spec
from hpcdl.config.load import all_settings, file_layer, set_layer
from hpcdl.config.schema import ScriptConfig
from hpcdl.core.errors import UsageError
from hpcdl.core.storage.disk import make_output_folder

LONGEST_WARNING_S = 300.0
"""A checkpoint takes seconds to minutes; the batch system may also warn up to a minute early."""
_WITH_RANKS = {"train", "run"}
_SIZED = {*_WITH_RANKS, "infer"}
"""Commands with as many ranks as the job has; they accept --stage-env."""
_RESUMABLE = {"train", "run", "sweep", "infer"}
_COMPUTES = {"bench", "certify", "doctor", "evaluate", "infer", "run", "shard", "sweep", "train", "tune-threads"}
"""Commands that get all CPUs of a node by default."""
_SWITCHES = {
    *(f"--{setting.key}" for setting in all_settings(ScriptConfig) if setting.kind == "bool"),
    "--prefix", "--allow-undistributed", "--from-horovod", "--check", "-q", "--quiet", "--trust", "-h", "--help", "--",
}  # fmt: skip
"""Flags of `run` that take no value."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The user's request; `command` are the words after `--`, `folder` is for script and log."""

    command: Sequence[str]
    nodes: int = 1
    ranks_per_node: int = 1
    time_s: float = 3600.0
    warning_s: float | None = None
    partition: str = ""
    account: str = ""
    name: str = ""
    until_done: bool = False
    max_requeues: int = 20
    stage_env: bool = False
    folder: Path | None = None
    nodes_wanted: NodeWishes = NodeWishes()


def wanted_by(config: SubmitConfig, command: Sequence[str], *, name: str = "") -> Wanted:
    """Return the request that the settings of `submit` describe."""
    job, batch = config.job, config.batch
    return Wanted(
        command=command, nodes=job.nodes, ranks_per_node=job.ranks_per_node, time_s=job.time, warning_s=job.warning,
        partition=batch.partition, account=batch.account, name=name, until_done=job.until_done,
        max_requeues=job.max_requeues, stage_env=job.stage_env, nodes_wanted=resources_of(batch),
    )  # fmt: skip


def resources_of(batch: BatchConfig) -> NodeWishes:
    """Return what a job requires of its nodes."""
    return NodeWishes(
        cpus_per_task=batch.cpus_per_task, exclusive=batch.exclusive, mem=batch.mem, qos=batch.qos,
        constraint=batch.constraint, gres=batch.gres, exclude=batch.exclude, options=tuple(batch.batch_option),
    )  # fmt: skip


def plan_job(wanted: Wanted, now: float | None = None) -> tuple[JobRequest, Path | None]:
    """Return the job to submit, and the run directory of `train` or `run`. Raises UsageError if parts do not fit."""
    command, of_script = divided(wanted.command)
    command = [word for word in command if word != "--json"]
    kind = command[0]
    with_ranks = kind in _WITH_RANKS
    if wanted.until_done and kind not in _RESUMABLE:
        raise UsageError(
            f"--until-done goes with `train`, `run`, `infer` and `sweep`, and this is `{kind}`; leave it out"
        )
    if wanted.stage_env and kind not in _SIZED:
        raise UsageError(f"--stage-env goes with `train`, `run` and `infer`, and this is `{kind}`; leave it out")
    if wanted.time_s < 60:
        raise UsageError(f"--time {wanted.time_s:g}s: batch systems count in minutes; give 1m or more")
    num_ranks = wanted.nodes * wanted.ranks_per_node
    warning_s = min(LONGEST_WARNING_S, wanted.time_s / 4) if wanted.warning_s is None else wanted.warning_s
    if not 0 < warning_s < wanted.time_s:
        raise UsageError(f"--warning {warning_s:g}s must be more than 0 and less than --time {wanted.time_s:g}s")
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    name = wanted.name or f"hpcdl-{kind}"
    run_dir: Path | None = None
    if kind == "infer":
        command = _with_ranks(command, wanted, num_ranks)
    if with_ranks:
        label = f"{Path(of_script[0]).stem}-script" if of_script else _label(command)
        command, run_dir = _completed(command, wanted, num_ranks, f"{stamp}-{label}")
    if wanted.stage_env and "--stage-env" not in command:
        command = [*command, "--stage-env"]
    # A requeued job runs the same command line again.
    if wanted.until_done and "--resume" not in command:
        command = [*command, "--resume"]
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)
    default_folder = _of_job(run_dir or _free(Path("runs") / f"{stamp}-{plain}"))
    request = JobRequest(
        name=name,
        command=[*command, *of_script],
        folder=(wanted.folder or default_folder).absolute(),
        nodes=wanted.nodes,
        ranks_per_node=wanted.ranks_per_node,
        time_s=wanted.time_s,
        warning_s=warning_s,
        partition=wanted.partition,
        account=wanted.account,
        until_done=wanted.until_done,
        max_requeues=wanted.max_requeues,
        outlives_nodes="--elastic" in command,
        nodes_wanted=wanted.nodes_wanted,
    )
    return request, run_dir


def _with_cpus(request: JobRequest) -> JobRequest:
    """Give the ranks all CPUs of a node if the user names no number: a rank with one core of many is a mistake."""
    nodes, system = request.nodes_wanted, SYSTEMS.get(load_launcher(batch_launcher()).batch)
    if nodes.cpus_per_task or request.command[0] not in _COMPUTES or system is None:
        return request
    cpus = system.cpus_of_node(request.partition)
    if not cpus:
        return request
    cpus_per_task = max(cpus // request.ranks_per_node, 1)
    return dataclasses.replace(request, nodes_wanted=dataclasses.replace(nodes, cpus_per_task=cpus_per_task))


def submit_job(wanted: Wanted, flags: Sequence[str] = ()) -> tuple[jobs.Job, bool]:
    """Submit the job and store it with its `flags`; return the job, and whether it could be stored."""
    request, run_dir = plan_job(wanted)
    while all(made.path != request.folder for made in make_output_folder(request.folder, "")):
        again = plan_job(wanted)
        if again[0].folder == request.folder:  # the user named it
            break
        request, run_dir = again  # another call of this second took the name
    system, number, _ = submit(_with_cpus(request))
    job = jobs.Job(
        number=number,
        system=system,
        name=request.name,
        folder=str(request.folder),
        command=tuple(request.command),
        nodes=request.nodes,
        ranks=request.nodes * request.ranks_per_node,
        run_dir=str(run_dir.absolute()) if run_dir else "",
        submitted_at=time.time(),
        # Also where a file asked for it: `hpcdl jobs` and `hpcdl cancel` need to know.
        flags=(*flags, *(["--until-done"] if wanted.until_done and "--until-done" not in flags else [])),
        working=str(Path.cwd()),
    )
    return job, jobs.remember(job)


def trial_of(wanted: Wanted) -> list[str]:
    """Return the command that tests, before a job waits, how it would fail at its start; empty if there is none.

    Raises UsageError for known problems: a missing script, or gRPC servers on nodes that other users may share.
    """
    command, of_script = divided(plan_job(wanted)[0].command)
    if command[0] == "run" and of_script and not Path(of_script[0]).is_file():
        raise UsageError(f"the script {of_script[0]} is not there; it is run in {Path.cwd()}, where the job starts")
    if command[0] == "sweep":
        return [*command, "--dry-run"]
    if command[0] != "train":
        return []
    strategy, allowed = _value(command, "--strategy") or "", "--allow-grpc" in command or wanted.nodes_wanted.exclusive
    if strategy.startswith("grpc-") and not allowed:
        raise UsageError(f"--strategy {strategy} needs nodes without other users: add --exclusive")
    return [*_without(command, "--inject"), "--dry-run"]  # hosts of faults are those of the job


def script_of(wanted: Wanted) -> str:
    """Return the job's script for --dry-run; nothing is written."""
    return render(_with_cpus(plan_job(wanted)[0]))


def left_out(flags: Mapping[str, object]) -> str:
    """Return a warning if the launcher's script has no place for some of `flags`, since no batch system reads it."""
    name = batch_launcher()
    unused = [f"--{key}" for key in (*BATCH_KEYS, "until-done") if flags.get(key)]
    unused += [f"--nodes {nodes}"] if (nodes := str(flags.get("nodes") or 1)) != "1" else []
    if not unused or load_launcher(name).batch:
        return ""
    return (
        f"the launcher {name} has no batch system: the script runs here, without {', '.join(unused)}; "
        f"for a job's script set {LAUNCHER_VARIABLE} to slurm, pbs, flux or lsf"
    )


def divided(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return hpcdl's own words and, for `run`, the script with its words."""
    own_words = list(command)
    if own_words[0] != "run":
        return own_words, []
    index = 1
    while index < len(own_words) and own_words[index].startswith("-"):
        word, following = own_words[index], own_words[index + 1 : index + 2]
        alone = "=" in word or word in _SWITCHES or word.startswith("--no-") or _with_value(word)
        alone = alone or (word == "--trace" and not any(map(is_trace_spec, following)))
        index += 1 if alone else 2
    return own_words[:index], own_words[index:]


def _with_value(word: str) -> bool:
    """Return whether `word` is a short flag with its value, such as -n4."""
    return re.match(r"-[a-z].", word) is not None


def _with_ranks(words: list[str], wanted: Wanted, num_ranks: int) -> list[str]:
    """Return the command with as many ranks as the job has. Raises UsageError if it asks for another number."""
    asked = _value(words, "--ranks") or _value(words, "-n")
    if asked is None:
        return [*words, "--ranks", str(num_ranks)]
    if asked != str(num_ranks):
        raise UsageError(f"--ranks {asked}, but {_size(wanted)}; leave --ranks out")
    return words


def _size(wanted: Wanted) -> str:
    num_ranks = wanted.nodes * wanted.ranks_per_node
    return f"--nodes {wanted.nodes} x --ranks-per-node {wanted.ranks_per_node} = {num_ranks}"


def overridden(wanted: Wanted) -> str:
    """Return a warning if the command's --config file or --set names other ranks than the job has; empty otherwise."""
    words, _ = divided(wanted.command)
    asked, origin = _configured(words, "ranks") if words[0] in _SIZED else ("", "")
    if asked in ("", str(wanted.nodes * wanted.ranks_per_node)):
        return ""
    return f"{origin} has ranks = {asked}, but {_size(wanted)}, which counts; set both flags to what you need"


def _completed(words: list[str], wanted: Wanted, num_ranks: int, name: str) -> tuple[list[str], Path]:
    """Return `train` or `run` with ranks and run directory, which is chosen here so that a requeued job finds it."""
    words = _with_ranks(words, wanted, num_ranks)
    named = _value(words, "--run-dir") or _configured(words, "run-dir")[0]
    run_dir = Path(named) if named else _free(Path("runs") / re.sub(r"[^A-Za-z0-9._-]", "_", name))
    if _value(words, "--run-dir") is None:
        words = [*words, "--run-dir", str(run_dir)]
    return words, run_dir


def _of_job(run_dir: Path) -> Path:
    """Return the folder for the script and the log of a job with this run directory."""
    return run_dir.with_name(f"{run_dir.name}.job")


def _free(run_dir: Path) -> Path:
    """Return `run_dir`, or with a number behind it if a run or job of the same second has that name."""
    others = (run_dir.with_name(f"{run_dir.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([run_dir], others) if not (path.exists() or _of_job(path).exists()))


def _configured(words: Sequence[str], key: str) -> tuple[str, str]:
    """Return the value of `key` in the command's --config file or --set, and which of them has it; empty for none."""
    config = _value(words, "--config")
    layers = [*([file_layer(Path(config))] if config else []), set_layer(_values(words, "--set"))]
    found = [(str(layer.values[key]), layer.origin) for layer in layers if layer.values.get(key)]
    return found[-1] if found else ("", "")


def _label(words: Sequence[str]) -> str:
    model = Path((_value(words, "--model") or "train").partition(":")[0]).stem
    strategy = _value(words, "--strategy") or "ring"
    return f"{model}-{strategy}"


def _without(words: Sequence[str], flag: str) -> list[str]:
    """Return a command line without `flag` and its value."""
    kept, skips = [], False
    for word in words:
        if not skips and word != flag and not word.startswith(f"{flag}="):
            kept.append(word)
        skips = word == flag and not skips
    return kept


def _value(words: Sequence[str], flag: str) -> str | None:
    """Return the value of `flag` in a command line, also from `flag=value`; the last one counts."""
    return next(reversed(_values(words, flag)), None)


def _values(words: Sequence[str], flag: str) -> list[str]:
    values = []
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            values.append(words[index + 1])
        elif word.startswith(f"{flag}="):
            values.append(word.partition("=")[2])
        elif len(flag) == len("-n") and word.startswith(flag) and _with_value(word):
            values.append(word.removeprefix(flag))
    return values
