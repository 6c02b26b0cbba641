"""`--install-completion`: a separate file for the shell, and the line that loads it, which the user adds.

Typer's own option rewrites the user's ~/.bashrc; a full disk or a signal then leaves a truncated file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Typer has no public way to get the script alone.
from typer._completion_shared import Shells, _get_shell_name, get_completion_script

from hpcdl.cli.output import put, say
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import quoted
from hpcdl.core.storage.disk import make_output_folder
from hpcdl.core.storage.files import write_output

_FILES: Mapping[str, str] = {
    Shells.bash.value: ".local/share/hpcdl/hpcdl.bash",
    Shells.zsh.value: ".local/share/hpcdl/zsh/_hpcdl",
    Shells.fish.value: ".config/fish/completions/hpcdl.fish",
}
"""Each shell's file, relative to the user's home."""


def install(shell: str | None = None) -> Path:
    """Write the file for `shell`, by default the caller's. Raises UsageError for another shell or a foreign file."""
    users_own = Path(os.environ.get("SHELL", "")).name
    shell = shell or _get_shell_name() or users_own
    if shell not in _FILES:
        raise UsageError(f"--install-completion: {shell or 'this'} is no shell with completion: {', '.join(_FILES)}")
    path = Path.home() / _FILES[shell]
    make_output_folder(path.parent, "")
    write_output(path, get_completion_script(prog_name="hpcdl", complete_var="_HPCDL_COMPLETE", shell=shell) + "\n")
    put(str(path))
    if users_own not in ("", shell):
        remedy = f"type this in {users_own} for the other" if users_own in _FILES else f"{users_own} has no completion"
        say(f"this is for {shell}, in which you typed it; SHELL is {users_own}: {remedy}")
    say(f"next: {_loaded_by(shell, path)}")
    return path


def _loaded_by(shell: str, path: Path) -> str:
    """Return the command that the user types once, so that new shells load the file at `path`."""
    lines = {
        Shells.bash.value: f"source {quoted(path)}",
        Shells.zsh.value: f"fpath+=({quoted(path.parent)}); autoload -Uz compinit; compinit",
    }
    if shell not in lines:
        return "start a new shell, which loads it by itself"
    return f"echo {quoted(lines[shell])} >> ~/.{shell}rc"
