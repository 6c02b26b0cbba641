"""Options that a command does not have: under the names of other programs, mistyped, or of other commands."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from hpcdl.config.other_names import called_here
from hpcdl.core.units import listed

_NEAR = 0.72
"""Likeness from which on an option may be another one, mistyped."""
_FEW = 3
"""Number of commands up to which it helps that they have an option."""
_POSSIBLE = re.compile(r" \(Possible options?: .*\)$", re.DOTALL)


def instead(text: str, error: Any) -> str:
    """Return the `text` of typer's NoSuchOption with what the option is called here, in place of similar letters."""
    given = str(getattr(error, "option_name", "") or "")
    context = getattr(error, "ctx", None)
    if not text.startswith("No such option") or not given or context is None:
        return text
    own = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
    text = _POSSIBLE.sub("", text)
    if given in ("-v", "--verbose") and context.parent:
        return f"{text}; it stands before the command: hpcdl -v {context.command.name}"
    meant = [f"--{name}" for name in called_here(_word(given), [option.removeprefix("--") for option in own])]
    if meant:
        metavar = next((one.metavar or "" for one in context.command.params if meant[0] in one.opts), "")
        # Others count steps there: `--save-every 100` must not become 100 s.
        return f"{text}; here it is {meant[0]}{' TIME, as 10m' if metavar.startswith('TIME') else ''}"
    if near := _near(given, own):
        return f"{text} (Possible options: {', '.join(near)})"
    others = _elsewhere(given, context.command.name)
    return f"{text}; {listed(others)} {'has' if len(others) == 1 else 'have'} it" if others else text


def _word(option: str) -> str:
    return option.lstrip("-").replace("_", "-").lower()


def _near(given: str, own: Sequence[str]) -> list[str]:
    """Return up to three options that may be `given`, mistyped or cut, the nearest first."""
    word = _word(given)
    likeness = {name: SequenceMatcher(None, word, _word(name)).ratio() for name in own}
    near = [name for name in own if likeness[name] >= _NEAR or (len(word) > 2 and word in _word(name).split("-"))]
    return sorted(near, key=lambda name: (-likeness[name], name))[:3]


def _elsewhere(given: str, command: str) -> list[str]:
    """Return the other commands that have this option: none if most have it, and submit alone, which starts others."""
    import typer.main

    from hpcdl.cli.app import app_for

    commands: Mapping[str, Any] = typer.main.get_group(app_for()).commands
    having = [name for name, other in commands.items() if name != command and given in _options(other.params)]
    if "submit" in having and command in ("train", "run", "infer"):
        having = ["submit"]
    return [f"`hpcdl {name}`" for name in having] if len(having) <= _FEW else []


def _options(parameters: Sequence[Any]) -> Collection[str]:
    return {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)}
