"""The layers of settings: can they be read, do they hold known keys, may the user write their own."""

from __future__ import annotations

import os

from hpcdl.config.load import load, standard_layers
from hpcdl.config.schema import TrainConfig
from hpcdl.config.site import site_rules
from hpcdl.core.errors import UsageError
from hpcdl.core.files import read_toml
from hpcdl.core.paths import site_config_file, user_config_folder
from hpcdl.doctor.finding import Finding, Subject, failure, ok, warning

_NEEDED = {"model": "lenet", "data": "synthetic:cifar10"}
"""Stands in for what a command line would give."""


def check(subject: Subject) -> list[Finding]:
    """site.toml, the user's config.toml, and the folder that profiles are written to."""
    found = [*_readable(), *_writable()]
    return found or [ok("config", f"site settings {_site()}; your own in {user_config_folder()}")]


def _site() -> str:
    path = site_config_file()
    return str(path) if path.is_file() else f"none ({path} does not exist)"


def _readable() -> list[Finding]:
    from hpcdl.config.load import Layer

    found = []
    for path in (site_config_file(), user_config_folder() / "config.toml"):
        try:
            if path.is_file():
                read_toml(path)
        except UsageError as error:
            found.append(failure("config", str(error), f"correct {path}, or move it away"))
    if found:
        return found
    try:
        site_rules()
        load(TrainConfig, [Layer(origin="doctor", values=_NEEDED), *standard_layers("train")])
    except UsageError as error:
        remedy = "correct the file that the message names"
        found += [failure("config", line, remedy) for line in str(error).splitlines()]
    return found


def _writable() -> list[Finding]:
    folder = user_config_folder()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(nearest, os.W_OK | os.X_OK):
        return []
    text = f"{nearest} cannot be written: profiles of `hpcdl tune-threads` cannot be stored"
    return [warning("config", text, "set XDG_CONFIG_HOME to a folder that you may write to")]
