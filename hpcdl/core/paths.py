"""The places of hpcdl's files and the user's settings, how its programs start, and Keras's choice of backend."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from hpcdl.core.errors import UsageError, printable


def share_folder() -> Path:
    """Return the folder with machines, jobs, examples, schemas and references.

    It is `$HPCDL_SHARE` (set by the modulefile), else that of a checkout, of the wheel, or of the environment's prefix.
    """
    named = os.environ.get("HPCDL_SHARE")
    if named:
        return Path(named)
    package = Path(__file__).resolve().parents[1]
    places = (package.parent / "share" / "hpcdl", package / "share", Path(sys.prefix) / "share" / "hpcdl")
    return next((folder for folder in places if folder.is_dir()), places[-1])


def docs_folder() -> Path:
    """Return the folder of the documentation: that of a checkout, else the one in the share folder."""
    checkout = Path(__file__).resolve().parents[2] / "docs"
    return checkout if (checkout / "index.md").is_file() else share_folder() / "docs"


def user_config_folder() -> Path:
    """Return `$XDG_CONFIG_HOME/hpcdl`, by default `~/.config/hpcdl`."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "hpcdl"


def site_config_file() -> Path:
    """Return the file of the site's settings: `$HPCDL_SITE_CONFIG`, else `site.toml` in the share folder."""
    named = os.environ.get("HPCDL_SITE_CONFIG")
    return Path(named) if named else share_folder() / "site.toml"


def user_cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/hpcdl`, by default `~/.cache/hpcdl`, for data that can be measured again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hpcdl"


def own_program(module: str, *words: str, python: str = sys.executable) -> list[str]:
    """Return the command line that runs a module of hpcdl.

    With `-P`, Python imports nothing from the current folder: a file random.py or a folder hpcdl there has no effect.
    """
    return [python, "-P", "-m", module, *words]


def typed(*words: object) -> str:
    """Return an `hpcdl` command with these words, quoted for a shell whatever a path or name contains."""
    return " ".join(["hpcdl", *map(quoted, words)])


def quoted(word: object) -> str:
    """Quote a word, path or number for a shell; a path never looks like a flag, and control codes are escaped."""
    text = f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)
    if printable(text) == text:
        return shlex.quote(text)
    # ANSI-C quoting: plain quotes cannot hold control codes.
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(letter: str) -> str:
    if letter in "\\'":
        return f"\\{letter}"
    if printable(letter) == letter:
        return letter
    return "".join(f"\\x{byte:02x}" for byte in letter.encode("utf-8", "surrogateescape"))


TENSORFLOW = "tensorflow"
BACKEND_VARIABLE = "KERAS_BACKEND"


def other_backend(environment: Mapping[str, str]) -> str | None:
    """Return what selects a backend other than TensorFlow, with the remedy; None if Keras would use TensorFlow.

    Follows Keras: the environment variable takes precedence over the user's keras.json.
    """
    named = environment.get(BACKEND_VARIABLE)
    if named:
        return None if named == TENSORFLOW else f"{BACKEND_VARIABLE}={named}: {_remedy()}"
    path = _settings_file(environment)
    try:
        named = json.loads(path.read_text()).get("backend", TENSORFLOW)
    except (OSError, ValueError, AttributeError):  # Keras ignores such a file too
        return None
    return None if named == TENSORFLOW else f"{path} has the backend {named}: {_remedy()}"


def check_backend() -> None:
    """Raise UsageError if Keras would use a backend other than TensorFlow."""
    problem = other_backend(os.environ)
    if problem:
        raise UsageError(problem)


def _settings_file(environment: Mapping[str, str]) -> Path:
    home = environment.get("KERAS_HOME")
    return Path(home) / "keras.json" if home else Path.home() / ".keras" / "keras.json"


def _remedy() -> str:
    return f"hpcdl trains with Keras on TensorFlow alone; set {BACKEND_VARIABLE}={TENSORFLOW}"
