"""Every command on a page is accepted by the command line's own parser, or is a target of the Makefile."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from hpcdl.cli.app import app_for
from tests.docs.pages import ROOT, pages, relative

_FENCE = re.compile(r"^(```|~~~)(\w*)[^\n]*\n(.*?)^\1", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^(?: {4}|\t).*\n)+", re.MULTILINE)
_COMMAND = re.compile(r"^(?:[$!] ?)?(?:\w+=\$?\(?)?(?=(?:hpcdl|make) )")
_STOPS = {"|", "||", "&&", ";", ">", ">>", "2>&1", "&"}


def blocks(page: Path) -> Iterator[str]:
    """Yield the code blocks of a page, fenced and indented."""
    text = page.read_text()
    for _, language, body in _FENCE.findall(text):
        if language not in ("python", "toml", "json", "lua"):
            yield body
    for found in _INDENTED.findall(_FENCE.sub("", text)):
        yield re.sub(r"^(?: {4}|\t)", "", found, flags=re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Return each hpcdl or make command as words; a synopsis includes its parts in brackets."""
    found = []
    for block in blocks(page):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            # A line may have several: `hpcdl a      makes a        hpcdl b      makes b`.
            for part in re.split(r"\s{4,}(?=hpcdl )|(?<=;) ", line.strip()):
                found += [words(_COMMAND.sub("", part))] if _COMMAND.match(part) else []
    return found


def words(line: str) -> list[str]:
    """Return a shell line's words up to its first pipe, comment, or explanation."""
    plain = re.split(r"\s{3,}|\s#\s|\s#$", line)[0]
    plain = re.sub(r"[\[\]]", " ", plain) if re.search(r"\[-", plain) else plain
    plain = re.sub(r"(?<=\S)\.\.\.(?=\s|$)|\s\.\.\.(?=\s|$)", "", plain).rstrip(")")
    found = []
    for word in shlex.split(plain):
        if word in _STOPS:
            break
        found.append(word)
    return found


@functools.cache
def command_line() -> Any:
    """Return the parser of the whole command line, made once."""
    return typer.main.get_command(app_for())


def parse(arguments: list[str]) -> None:
    """Parse `arguments` with the command line's parser; raises if they are no command."""
    command = command_line()
    name = "hpcdl"
    while True:
        is_group = bool(getattr(command, "commands", None))
        if arguments in ([], ["-h"], ["--help"], ["--version"]) or (is_group and arguments[:1] in (["-h"], ["--help"])):
            return
        # A flag's own checks (existing files) are skipped: only the words count.
        context = command.make_context(name, list(arguments), resilient_parsing=False)
        if not is_group:
            inner = context.params.get("command")
            if name == "submit" and inner:
                parse([word for word in inner if word != "hpcdl"])
            return
        _, rest, _ = command.make_parser(context).parse_args(list(arguments))
        name, command, arguments = command.resolve_command(context, rest)


@pytest.mark.parametrize("page", [page for page in pages() if commands(page)], ids=relative)
def test_commands_are_commands(page: Path) -> None:
    targets = set(re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {name for line in targets for name in line.split()}
    for program, *arguments in commands(page):
        if program == "make":
            named = [word for word in arguments if "=" not in word and not word.startswith("-")]
            assert set(named) <= targets, f"{relative(page)}: make {' '.join(arguments)}"
        else:
            parse(arguments)  # raises the command line's own error


def test_the_test_finds_commands_and_faults() -> None:
    assert sum(len(commands(page)) for page in pages()) > 60
    for wrong in (["train", "--stratgy", "ring"], ["shrad", "a", "b"], ["diff", "one"]):
        with pytest.raises(Exception, match=r"."):
            parse(wrong)
