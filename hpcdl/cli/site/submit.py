"""`hpcdl submit`: hand a command of hpcdl to the batch system."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, put, say
from hpcdl.core.errors import HpcdlError, UnknownNameError, UsageError
from hpcdl.core.units import parse_seconds

if TYPE_CHECKING:
    from hpcdl.cluster.batch import submission

COMMANDS = (
    "bench",
    "certify",
    "doctor",
    "evaluate",
    "export",
    "report",
    "run",
    "shard",
    "sweep",
    "train",
    "tune-threads",
)
"""What makes sense in a job."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: hpcdl submit --nodes 4 --time 2h --until-done -- train --model lenet --data shards")(
        submit
    )


Nodes = Annotated[int, typer.Option("--nodes", min=1, metavar="N", help="Number of nodes.")]
RanksPerNode = Annotated[int, typer.Option("--ranks-per-node", min=1, metavar="R", help="Ranks on each node.")]
Time = Annotated[str, typer.Option("--time", metavar="TIME", help="Time limit, such as 2h or 1-00:00:00.")]
Partition = Annotated[str, typer.Option("--partition", metavar="NAME", help="Partition or queue.")]
Account = Annotated[str, typer.Option("--account", metavar="NAME", help="Account that pays.")]
CpusPerTask = Annotated[
    int | None,
    typer.Option("--cpus-per-task", min=1, metavar="N", help="CPUs of each rank. [all of a node, by its ranks]"),
]
Exclusive = Annotated[bool, typer.Option("--exclusive", help="Nodes without other jobs; grpc-* need it.")]
Mem = Annotated[str, typer.Option("--mem", metavar="SIZE", help="Memory of each node, such as 64G.")]
Qos = Annotated[str, typer.Option("--qos", metavar="NAME", help="Quality of service (Slurm).")]
Constraint = Annotated[
    str, typer.Option("--constraint", metavar="FEATURES", help="Features that nodes must have (Slurm).")
]
Gres = Annotated[str, typer.Option("--gres", metavar="LIST", help="Devices of each node, as gpu:4 (Slurm).")]
Exclude = Annotated[str, typer.Option("--exclude", metavar="NODES", help="Nodes to leave out (Slurm).")]
BatchOption = Annotated[
    list[str] | None,
    typer.Option(
        "--batch-option", metavar="OPTION", help="Any option of the batch system, as --nice=100; may be repeated."
    ),
]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the job. [hpcdl-COMMAND]")]
UntilDone = Annotated[
    bool, typer.Option("--until-done", help="Checkpoint before the time limit, requeue and continue until done.")
]
MaxRequeues = Annotated[int, typer.Option("--max-requeues", min=0, metavar="N", help="At most so many requeues.")]
Warn = Annotated[
    str | None,
    typer.Option("--warning", metavar="TIME", help="Time before the limit to save at. [a quarter, at most 5m]"),
]
StageEnv = Annotated[bool, typer.Option("--stage-env", help="Unpack the Python environment on each node first.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job script; nothing is submitted.")]


def submit(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What would follow `hpcdl`.")],
    nodes: Nodes = 1,
    ranks_per_node: RanksPerNode = 1,
    time: Time = "1h",
    partition: Partition = "",
    account: Account = "",
    cpus_per_task: CpusPerTask = None,
    exclusive: Exclusive = False,
    mem: Mem = "",
    qos: Qos = "",
    constraint: Constraint = "",
    gres: Gres = "",
    exclude: Exclude = "",
    batch_option: BatchOption = None,
    name: Name = "",
    until_done: UntilDone = False,
    max_requeues: MaxRequeues = 20,
    warning: Warn = None,
    stage_env: StageEnv = False,
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Run a command of hpcdl as a batch job.

    Its ranks start on all nodes of the job.
    """
    from hpcdl.cluster.batch import submission
    from hpcdl.cluster.batch.systems import NodeWishes

    if command[0] not in COMMANDS:
        raise UnknownNameError("command for a job", command[0], COMMANDS)
    wanted = submission.Wanted(
        command=command, nodes=nodes, ranks_per_node=ranks_per_node, time_s=_seconds("--time", time),
        warning_s=None if warning is None else _seconds("--warning", warning), partition=partition, account=account,
        name=name, until_done=until_done, max_requeues=max_requeues, stage_env=stage_env,
        nodes_wanted=NodeWishes(
            cpus_per_task=cpus_per_task, exclusive=exclusive, mem=mem, qos=qos, constraint=constraint, gres=gres,
            exclude=exclude, options=tuple(batch_option or ()),
        ),
    )  # fmt: skip
    if dry_run:
        _show_script(wanted, json=json)
        return
    _check(submission.trial_of(wanted))
    job = submission.submit_job(wanted)
    if json:
        print_json(dataclasses.asdict(job))
        return
    put(str(job.number))
    say(f"log and script: {job.folder}" + (f"; run: {job.run_dir}" if job.run_dir else ""))
    say(f"next: hpcdl jobs {job.number}")


def _show_script(wanted: submission.Wanted, *, json: bool) -> None:
    from hpcdl.cluster.batch import submission

    script = submission.script_of(wanted)
    try:
        _check(submission.trial_of(wanted))
    except HpcdlError as error:
        say(f"warning: the job would be refused: {error}")
    print_json({"script": script}) if json else print(script, end="")


def _check(trial: list[str]) -> None:
    """Raise what the command `trial` ends with."""
    from hpcdl.cli.main import run

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = run(trial) if trial else 0
    if code:
        lines = said.getvalue().strip().splitlines() or [f"the command ends with exit code {code}"]
        refused = HpcdlError(lines[-1].removeprefix("hpcdl: "))
        refused.exit_code = code
        raise refused


def _seconds(flag: str, text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
