"""Job scripts: filled in from a template and submitted to a batch system."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

from hpcdl.cluster.batch.systems import SYSTEMS, JobRequest, call
from hpcdl.cluster.launchers import LAUNCHER_VARIABLE, find_launcher, load_launcher
from hpcdl.config.load import MACHINE_VARIABLE, machine_in_force
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.paths import own_program, share_folder, site_config_file
from hpcdl.core.storage.disk import make_output_folder
from hpcdl.core.storage.files import write_output

_HANDED_ON = (
    "HPCDL_ADDRESS", MACHINE_VARIABLE, "HPCDL_SHARE", "HPCDL_SITE_CONFIG", "HPCDL_SRUN_MPI", "LD_LIBRARY_PATH",
    "MPI4PY_LIBMPI", "MPI4PY_MPIABI", "XDG_CACHE_HOME", "XDG_CONFIG_HOME",
)  # fmt: skip
"""Variables that a job must find as at submission, whatever the batch system itself exports."""
_PLACE = re.compile(r"@([A-Z_]+)@")


def render(request: JobRequest, environment: Mapping[str, str] = os.environ) -> str:
    """Return the whole job script; every value in it is quoted for the shell and for the batch system's own parser."""
    wanted = request.nodes_wanted
    words_of_nodes = (wanted.mem, wanted.qos, wanted.constraint, wanted.gres, wanted.exclude)
    for value in (
        request.name, request.partition, request.account, *words_of_nodes, str(request.folder), *request.command
    ):  # fmt: skip
        if "\n" in value or "\0" in value:
            raise UsageError(f"{value!r} has a line break in it; a job script cannot hold that")
    name = request.launcher or batch_launcher(environment)
    system = SYSTEMS.get(load_launcher(name).batch)
    number = f'"${system.job_variable}"' if system else '"$$"'
    variables = {key: environment[key] for key in _HANDED_ON if environment.get(key)} | {LAUNCHER_VARIABLE: name}
    exports = [f"export {key}={shlex.quote(value)}" for key, value in sorted(variables.items())]
    program_line = own_program("hpcdl", *request.command)
    filled = {
        "DIRECTIVES": "\n".join(system.directives(request) if system else []),
        "ENVIRONMENT": "\n".join([*exports, *_module_lines(environment)]),
        "FOLDER": shlex.quote(os.getcwd()),  # noqa: PTH109  the shell's idea of it, which the user knows
        "SECONDS": str(int(request.time_s - request.warning_s)),
        "COMMAND": " ".join(shlex.quote(word) for word in program_line),
        "UNTIL_DONE": "yes" if request.until_done else "no",
        "MAX_REQUEUES": str(request.max_requeues),
        "LOG": shlex.quote(str(request.folder / "log")) + f"-{number}.txt",
        "CANCELLED": shlex.quote(str(request.folder / CANCELLED)) + f"-{number}",
    }
    template = template_of(name)
    text = template.read_text()
    unknown = set(_PLACE.findall(text)) - filled.keys()
    if unknown:
        raise UsageError(f"{template} has the unknown place @{min(unknown)}@; known: {', '.join(sorted(filled))}")
    return _PLACE.sub(lambda match: filled[match[1]], text)


_WITHOUT_MODULES = """if ! type module >/dev/null 2>&1; then
    for init in "${LMOD_PKG:-/usr/share/lmod/lmod}/init/bash" "${MODULESHOME:-/usr/share/modules}/init/bash"; do
        [ -r "$init" ] && . "$init" && break
    done
fi"""
"""Defines `module` in a job's shell, which is no login shell and may lack the command."""


def _module_lines(environment: Mapping[str, str]) -> list[str]:
    """Return lines that load the machine's modules over the exported variables; the job ends if one does not load."""
    machine = machine_in_force(environment)
    if machine is None or not machine.modules:
        return []
    what = f"of the machine {machine.name} does not load"
    loads = [f"module load {name} || {{ echo 'hpcdl: module {name} {what}' >&2; exit 2; }}" for name in machine.modules]
    return [_WITHOUT_MODULES, *loads]


CANCELLED = "cancelled"
"""A file of this name and the job's number in its folder means that the user wants no requeue of that job."""


def template_of(launcher: str) -> Path:
    """Return the site's template (`jobs/` beside site.toml), else the one that comes with hpcdl."""
    site_template = site_config_file().parent / "jobs" / f"{launcher}.sh"
    shipped = share_folder() / "jobs" / f"{launcher}.sh"
    template = site_template if site_template.is_file() else shipped
    if not template.is_file():
        raise UsageError(f"there is no job template {shipped} for the launcher {launcher}; set HPCDL_LAUNCHER")
    return template


def batch_launcher(environment: Mapping[str, str] = os.environ) -> str:
    """Return the launcher that a job submitted from here would use, judged by the commands on PATH."""
    named = environment.get(LAUNCHER_VARIABLE)
    if named:
        return load_launcher(named).name
    path = environment.get("PATH")
    # First: Slurm's wrappers may put a qsub on PATH as well.
    if shutil.which("sbatch", path=path):
        return "ibrun" if "TACC_SYSTEM" in environment else "slurm"
    if shutil.which("qsub", path=path):
        return "pbs"
    if shutil.which("flux", path=path):
        return "flux"
    if shutil.which("bsub", path=path):
        return "lsf"
    return find_launcher(environment).name


def submit(request: JobRequest) -> tuple[str, str, Path]:
    """Write and submit the script; return batch system, job id and script. Raises UsageError without a batch system."""
    name = request.launcher or batch_launcher()
    system = SYSTEMS.get(load_launcher(name).batch)
    if system is None:
        raise UsageError(
            f"the launcher {name} has no batch system here (neither sbatch nor qsub nor flux nor bsub on PATH); "
            "run the command directly, or write the script with --dry-run"
        )
    text = render(request)
    make_output_folder(request.folder, "")
    script = request.folder / "job.sh"
    write_output(script, text)
    answer = call([*system.submit], stdin=text) if system.reads_stdin else call([*system.submit, str(script)])
    match = system.number.search(answer)
    if not match:
        raise HpcdlError(f"{system.submit[0]} answered {answer.strip()[:200]!r}, in which there is no job id")
    return system.name, match[1], script
