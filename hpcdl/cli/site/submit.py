"""`hpcdl submit`: pass a command of hpcdl to the batch system."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.main

from hpcdl.cli.groups import WordsBehindDashes
from hpcdl.cli.options import JsonFlag, print_settings_of_files, settings_of_files, takes_settings
from hpcdl.cli.output import print_json, put, say
from hpcdl.config.commands import SubmitConfig, load_submit
from hpcdl.config.load import ResolvedConfig
from hpcdl.core.errors import HpcdlError, UnknownNameError, UsageError
from hpcdl.core.paths import quoted
from hpcdl.core.units import listed

if TYPE_CHECKING:
    from hpcdl.cluster.batch import submission

COMMANDS = (
    "bench",
    "certify",
    "doctor",
    "evaluate",
    "export",
    "infer",
    "report",
    "run",
    "shard",
    "sweep",
    "train",
    "tune-threads",
)
"""Commands that are useful in a job."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    epilog = "Example: hpcdl submit --nodes 4 --time 2h --until-done -- train --model lenet --data shards"
    app.command(cls=WordsBehindDashes, epilog=epilog)(submit)


Name = Annotated[str, typer.Option("--name", metavar="NAME", help="Name of the job. [hpcdl-COMMAND]")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the job script; nothing is submitted.")]


@takes_settings(SubmitConfig)
def submit(
    flags: dict[str, Any],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="What would follow `hpcdl`.")],
    name: Name = "",
    dry_run: DryRun = False,
    json: JsonFlag = False,
) -> None:
    """Run a command of hpcdl as a batch job.

    Its ranks start on all nodes of the job. The table [submit] of site.toml, or of your own config.toml, holds
    defaults.
    """
    from hpcdl.cluster.batch import jobs, submission

    if PurePath(command[0]).name == "hpcdl":
        words = " ".join(map(quoted, command[1:] or ["COMMAND"]))
        raise UsageError(f"behind -- stands what would follow `hpcdl`: type hpcdl submit ... -- {words}")
    if command[0] not in COMMANDS:
        raise UnknownNameError("command for a job", command[0], COMMANDS)
    settings = load_submit(flags)
    wanted = submission.wanted_by(settings.config, command, name=name)
    if doubt := submission.overridden(wanted):
        say(f"warning: {doubt}")
    if dry_run:
        if doubt := submission.left_out(flags):
            say(f"warning: {doubt}")
        _show_script(wanted, settings, json=json)
        return
    if doubt := _absent(_check_words(command)):
        say(f"warning: {doubt}")
    _check_job(wanted)
    job, is_stored = submission.submit_job(wanted, _typed_again(flags | {"name": name or None}))
    if doubt := jobs.asked_too_much(job):
        say(f"warning: {doubt}")
    if json:
        print_json(dataclasses.asdict(job))
        return
    put(str(job.number))
    print_settings_of_files(SubmitConfig, settings)
    say(f"log and script: {quoted(job.folder)}" + (f"; run: {quoted(job.run_dir)}" if job.run_dir else ""))
    if is_stored:
        say(f"next: hpcdl jobs {job.number}")


def _typed_again(flags: dict[str, Any]) -> list[str]:
    """Return the words of `flags`, without those of the job's size."""
    words: list[str] = []
    for key, value in flags.items():
        if value is None or key in ("nodes", "ranks-per-node"):
            continue
        if isinstance(value, bool):
            words.append(f"--{key}" if value else f"--no-{key}")
        else:
            words += [f"--{key}={one}" for one in (value if isinstance(value, list | tuple) else [value])]
    return words


def _show_script(wanted: submission.Wanted, settings: ResolvedConfig[SubmitConfig], *, json: bool) -> None:
    from hpcdl.cluster.batch import submission

    script = submission.script_of(wanted)
    try:
        if doubt := _absent(_check_words(list(wanted.command))):
            say(f"warning: {doubt}")
        _check_job(wanted)
    except HpcdlError as error:
        say(f"warning: the job would be refused: {error}")
    print_settings_of_files(SubmitConfig, settings)
    if json:
        from_files = settings_of_files(SubmitConfig, settings)
        rows = [{"key": key, "value": value, "origin": origin} for key, value, origin in from_files]
        print_json({"script": script, "defaults": rows})
    else:
        # Not by `put`: every byte counts in a script that is redirected into a file.
        print(script, end="")


def _check_words(command: list[str]) -> list[Path]:
    """Return the inputs that the command names, as far as its own check does not read them.

    Raises UsageError for words that its parser refuses: the job would fail on them at once.
    """
    from hpcdl.cli.app import app_for

    if not {"-h", "--help", "--version"}.isdisjoint(command):
        return []
    parser: Any = typer.main.get_command(app_for(command))
    name, arguments, context = "hpcdl", command, None
    try:
        while True:
            context = parser.make_context(name, list(arguments), parent=context)
            if not getattr(parser, "commands", None):
                return [] if command[0] in _CHECKED else list(_inputs(parser, context.params))
            _, remaining, _ = parser.make_parser(context).parse_args(list(arguments))
            name, parser, arguments = parser.resolve_command(context, remaining)
    except Exception as error:
        message = getattr(error, "format_message", None)  # typer's own errors
        if message is None:
            raise
        raise UsageError(f"{message().rstrip('.')}; see `hpcdl {command[0]} --help`") from None


_CHECKED = ("train", "run", "sweep")
"""Commands whose inputs are checked by themselves before the job is queued."""
_INPUTS = ("RUN", "RUN...", "RUN|MODEL.keras", "SOURCE")


def _inputs(parser: Any, values: dict[str, Any]) -> Iterator[Path]:
    """Yield the files and folders that a command reads, by its arguments and --data."""
    for parameter in parser.params:
        if parameter.metavar in _INPUTS or parameter.name == "data":
            value = values.get(parameter.name)
            for one in value if isinstance(value, list | tuple) else [value]:
                if one and ":" not in str(one):  # as in synthetic:mnist
                    yield Path(one).expanduser()


def _absent(inputs: list[Path]) -> str:
    """Return a warning of inputs that are not there; a job that waits for another may be given them by that one."""
    names = [quoted(path) for path in inputs if not path.exists()]
    if not names:
        return ""
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{listed(names)} {verb} not there: the job starts in {quoted(Path.cwd())}, and fails unless another makes it"
    )


def _check_job(wanted: submission.Wanted) -> None:
    """Raise the error that would end the job at its start."""
    from hpcdl.cluster.batch import submission
    from hpcdl.config.schema import InterruptionConfig
    from hpcdl.run.rundir import check_place

    _check(submission.trial_of(wanted))
    request, run_dir = submission.plan_job(wanted)
    if request.command[0] == "run" and run_dir and "--resume" not in request.command:
        check_place(run_dir, InterruptionConfig())
    if run_dir:
        _check_queue(run_dir, resumes="--resume" in submission.divided(wanted.command)[0])


def _check_queue(run_dir: Path, *, resumes: bool) -> None:
    """Raise UsageError if another job in the queue has the run directory; warn if this one continues its run."""
    from hpcdl.cluster.batch import jobs

    if (found := jobs.still_queued(run_dir)) is None:
        return
    job, state = found
    if not resumes:
        raise UsageError(
            f"--run-dir {run_dir}: job {job.number} ({state}) has it too; choose another, or first "
            f"`hpcdl cancel {job.number}`"
        )
    after = f": --batch-option=--dependency=afterany:{job.number}" if job.system == "slurm" else ""
    say(
        f"warning: job {job.number} ({state}) has the same run directory, and this job fails if it starts before that "
        f"one has ended; let it wait{after}"
    )


def _check(trial: list[str]) -> None:
    """Raise the error that the command `trial` ends with."""
    from hpcdl.cli.main import run

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as printed:
        # In this process, because a new one would import everything again.
        code = run(trial) if trial else 0
    if code:
        lines = printed.getvalue().strip().splitlines() or [f"the command ends with exit code {code}"]
        messages = [line.removeprefix("hpcdl: ") for line in lines if line.startswith("hpcdl: ")]
        refused = HpcdlError(*(messages or lines[-1:]))
        refused.exit_code = code
        raise refused
