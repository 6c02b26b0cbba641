"""Write man pages and shell completions from the command line itself: make_manual.py SHARE.

Writes SHARE/man/man1/hpcdl.1, one page for each command, and SHARE/completions/{hpcdl.bash,_hpcdl,hpcdl.fish}. None
of them may exist yet.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from hpcdl import __version__
from hpcdl.cli.app import app_for
from hpcdl.core.storage.disk import create, make_folder

COMPLETIONS = {"bash": "hpcdl.bash", "zsh": "_hpcdl", "fish": "hpcdl.fish"}
EXIT_STATUS = (
    ("0", "Done."),
    ("1", "Failed while working."),
    ("2", "What was handed in is unusable: flags, settings, source files. Nothing was written."),
    ("3", "Something that hpcdl wrote earlier (shard, manifest, checkpoint, record) fails its check."),
    ("75", "Stopped early with something to resume: run the same command with --resume."),
    ("130", "Interrupted with nothing to resume."),
)
ENVIRONMENT = (
    ("HPCDL_SHARE", "Folder with machines, job templates, examples and schemas."),
    ("HPCDL_SITE_CONFIG", "The centre's settings, weaker than the user's own."),
    ("XDG_CONFIG_HOME", "The user's settings are in hpcdl/ below it; ~/.config where it is unset."),
    ("XDG_CACHE_HOME", "What hpcdl measured and may measure again; ~/.cache where it is unset."),
)


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that is not hidden, with its words; the program itself first."""
    waiting: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app_for()))]
    while waiting:
        words, command = waiting.pop(0)
        yield words, command
        members = getattr(command, "commands", {}).items()
        waiting += [((*words, name), member) for name, member in members if not member.hidden]


def escaped(text: str) -> str:
    """Return `text` for roff, which then prints its backslashes, dashes and leading dots unchanged."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text[:1] in (".", "'") else text


def first_sentence(text: str) -> str:
    """Return the text after the dash in the NAME section."""
    return re.split(r"(?<=\.)\s", " ".join(text.split()))[0].rstrip(".")


def page(words: tuple[str, ...], command: Any) -> str:
    """Return the roff text of one command."""
    name = "-".join(("hpcdl", *words))
    line = " ".join(("hpcdl", *words))
    lines = [
        f'.TH "{name.upper()}" "1" "" "hpcdl {__version__}" "hpcdl"',
        ".SH NAME",
        f"{escaped(name)} \\- {escaped(first_sentence(command.help or ''))}",
        ".SH SYNOPSIS",
        f".B {escaped(line)}",
        escaped(usage(command)),
        ".SH DESCRIPTION",
        *(f"{escaped(part)}\n.PP" for part in (command.help or "").split("\n\n")[:-1]),
        escaped((command.help or "").split("\n\n")[-1]),
        *options(command),
    ]
    if members := getattr(command, "commands", {}):
        lines.append(".SH COMMANDS")
        for member in members:
            lines += [
                ".TP",
                f".BR {escaped(f'{name}-{member}')} (1)",
                escaped(first_sentence(members[member].help or "")),
            ]
    if command.epilog:
        lines += [".SH EXAMPLE", ".nf", ".RS", escaped(command.epilog.removeprefix("Example: ")), ".RE", ".fi"]
    if not words:
        lines += table("EXIT STATUS", EXIT_STATUS) + table("ENVIRONMENT", ENVIRONMENT)
    else:
        lines += [".SH EXIT STATUS", "As", ".BR hpcdl (1)", "says.", ".SH SEE ALSO", ".BR hpcdl (1)"]
    return "\n".join(lines) + "\n"


def usage(command: Any) -> str:
    """Return the text after the command's name."""
    return " ".join(command.collect_usage_pieces(context(command)))


def options(command: Any) -> Iterator[str]:
    """Yield the OPTIONS section."""
    shown = [item for item in command.params if is_option(item) and not getattr(item, "hidden", False)]
    if shown:
        yield ".SH OPTIONS"
    for item in shown:
        record = item.get_help_record(context(command))
        if record:
            yield from (".TP", f".B {escaped(record[0])}", escaped(record[1]))


def is_option(parameter: Any) -> bool:
    """Return whether `parameter` is a flag, not a positional."""
    return bool(parameter.param_type_name == "option")


def context(command: Any) -> Any:
    """Return the context with which the command line formats its own help."""
    return command.context_class(command, info_name=command.name)


def table(title: str, rows: tuple[tuple[str, str], ...]) -> list[str]:
    """Return a section of terms and their meanings."""
    return [f".SH {title}", *(line for term, text in rows for line in (".TP", f".B {escaped(term)}", escaped(text)))]


def completion(shell: str) -> str:
    """Return the script that `shell` sources; it calls hpcdl itself at each tab."""
    line = [sys.executable, "-c", "from hpcdl.cli.main import main; main()"]
    environment = {**os.environ, "_HPCDL_COMPLETE": f"source_{shell}"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Write everything below the folder named on the command line."""
    share = Path(sys.argv[1])
    manual, completions = share / "man" / "man1", share / "completions"
    texts = {manual / ("-".join(("hpcdl", *words)) + ".1"): page(words, command) for words, command in commands()}
    texts |= {completions / name: completion(shell) for shell, name in COMPLETIONS.items()}
    there = [path for path in texts if os.path.lexists(path)]
    if there:
        sys.exit(f"{there[0]} is there already, and is not written over; name another folder")
    for path, text in texts.items():
        make_folder(path.parent)
        create(path, text.encode())


if __name__ == "__main__":
    main()
