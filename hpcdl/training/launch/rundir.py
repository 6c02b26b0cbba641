"""A run directory: run.toml says what was asked and where each value came from."""

from __future__ import annotations

import os
import pwd
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from hpcdl.cluster.status import FOLDER
from hpcdl.config.load import Effective, Layer, as_toml_values, flatten, load, settings_by_key
from hpcdl.config.schema import ScriptConfig, TrainConfig
from hpcdl.config.settings import Matters
from hpcdl.core.errors import ConfigError, CorruptError, HpcdlError, UnknownNameError, UsageError
from hpcdl.core.files import read_toml, toml_text, write_text
from hpcdl.core.lock import FILE_NAME as LOCK_NAME
from hpcdl.core.lock import writing
from hpcdl.core.records import FILE_NAME as RECORD_NAME

Config = TypeVar("Config")
CONFIG_FILE = "run.toml"
MODEL_FILE = "model.keras"
PARTING_S = 15.0
"""Ranks end within 10 s of the process that started them."""
_OF_ONE_CALL = ("run-dir", "allow", "inject")
"""Settings that a resumed run does not take over."""
STRUCK = "injected-"
"""Begins the names of files, beside the ranks' own, for the faults that have struck since the user started the run."""
CHECKSUM, SCRIPT = "data-checksum", "script"
"""Facts of a run's start: of its data, or which script it runs."""


def default_run_dir(name: str, kind: str, now: float | None = None) -> Path:
    """`runs/<time>-<name>-<kind>`; of a name that is a path or names a function, the file's stem."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    base = Path("runs") / f"{stamp}-{Path(name.partition(':')[0]).stem}-{kind}"
    candidate, number = base, 2
    while candidate.exists():
        candidate, number = base.with_name(f"{base.name}-{number}"), number + 1
    return candidate


def resume_layer(run_dir: Path, kind: type[Any] = TrainConfig) -> list[Layer]:
    """The settings that the run in `run_dir` began with, as a layer below the flags; none where there is no run yet."""
    if not (run_dir / CONFIG_FILE).exists():
        return []
    effective, _ = read_as(kind, run_dir)
    values = as_toml_values(effective.config)
    given = {
        key: value for key, value in values.items() if effective.origins[key] != "default" and key not in _OF_ONE_CALL
    }
    return [Layer(origin=f"run ({run_dir})", values=given)]


def check_trusted(run_dir: Path, trust: bool) -> None:
    """UsageError where `run_dir` is another user's, root's too, and the user did not say to run the code it names.

    Its run.toml may name a file with a model, its model.keras classes of any module.
    """
    for path in (run_dir, run_dir / CONFIG_FILE, run_dir / MODEL_FILE):
        owner = path.stat().st_uid if path.exists() else os.geteuid()
        if owner != os.geteuid() and not trust:
            raise UsageError(
                f"{path} belongs to {_user(owner)}, and the code that it names would run as you; add --trust if you "
                "trust them, or take a copy that you have looked into"
            )


def _user(number: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(number).pw_name
    return f"user {number}"


@contextmanager
def written(run_dir: Path, *, resumes: bool) -> Iterator[None]:
    """Hold `run_dir`, which is made where it is missing, as its only writer; UsageError names another one.

    Ranks whose starting process was killed have PARTING_S to end.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HpcdlError(f"cannot write run directory {run_dir}: {error.strerror}; choose another --run-dir") from error
    with writing(run_dir):
        if not resumes:
            check_new(run_dir)
        if (run_dir / FOLDER).is_dir():
            with writing(run_dir / FOLDER, PARTING_S):
                pass
        for struck in (run_dir / FOLDER).glob(f"{STRUCK}*"):
            struck.unlink()
        yield


@contextmanager
def forgotten_if_refused(run_dir: Path) -> Iterator[None]:
    """Remove a run directory where the ranks find that what the user handed in is unusable, before anything is trained.

    What only TensorFlow can tell (a model's outputs, a loss's name) is found by the ranks, so that it is loaded once.
    """
    try:
        yield
    except HpcdlError as error:
        if error.exit_code == UsageError.exit_code and not (run_dir / RECORD_NAME).exists():
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def check_new(run_dir: Path) -> None:
    """UsageError where `run_dir` is being written, or exists and holds anything."""
    if not run_dir.exists():
        return
    if not run_dir.is_dir() or any(path.name != LOCK_NAME for path in run_dir.iterdir()):
        raise UsageError(f"run directory {run_dir} exists; choose another --run-dir, or go on with --resume")


def check_resumed(run_dir: Path, config: TrainConfig, data_checksum: str) -> None:
    """ConfigError with a line for each setting that changes results and differs from those of the run in `run_dir`.

    Of the data the content counts, not the place. What --allow names is taken as it is.
    """
    known = settings_by_key(TrainConfig)
    for key in config.checkpoint.allow:
        if key not in known:
            raise UnknownNameError("setting of --allow", key, known)
    if not (run_dir / CONFIG_FILE).exists():
        return
    begun, facts = read(run_dir)
    before, now = flatten(begun.config), flatten(config)
    differing = {
        key: (item.show(before[key]), item.show(now[key]))
        for key, item in known.items()
        if item.matters and Matters.RESULT in item.matters and before[key] != now[key] and key != "data"
    }
    checksum = facts.get(CHECKSUM, data_checksum if before["data"] == now["data"] else "unknown")
    if checksum != data_checksum:
        differing["data"] = (f"{before['data']} (checksum {checksum})", f"{now['data']} (checksum {data_checksum})")
    problems = [
        f"--{key}: {run_dir} began with {then}, now it is {given}; give what it began with, or --allow {key}"
        for key, (then, given) in differing.items()
        if key not in config.checkpoint.allow
    ]
    if problems:
        raise ConfigError(problems)


def create(run_dir: Path, effective: Effective[Any], facts: Mapping[str, Any]) -> None:
    """Make the folder and write run.toml; `facts` are what the run begins with beside its settings."""
    text = toml_text({**as_toml_values(effective.config), "facts": dict(facts), "origins": effective.origins})
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_text(run_dir / CONFIG_FILE, text)
    except OSError as error:
        raise HpcdlError(f"cannot write run directory {run_dir}: {error.strerror}; choose another --run-dir") from error


def read(run_dir: Path) -> tuple[Effective[TrainConfig], dict[str, Any]]:
    """The config of a training and the facts of its start; CorruptError where run.toml is missing or damaged."""
    return read_as(TrainConfig, run_dir)


def read_as(kind: type[Config], run_dir: Path) -> tuple[Effective[Config], dict[str, Any]]:
    """The same of a run whose settings are a `kind`; UsageError where they are another one's."""
    path = run_dir / CONFIG_FILE
    if not path.exists():
        raise CorruptError(f"{run_dir} holds no {CONFIG_FILE}; name a folder that `hpcdl train` made")
    document = read_toml(path, CorruptError)
    facts, origins = document.pop("facts", {}), document.pop("origins", {})
    if not isinstance(facts, dict) or not isinstance(origins, dict):
        raise CorruptError(f"{path} is damaged: facts and origins must be tables")
    if (SCRIPT in facts) != (kind is ScriptConfig):
        command = f"the script {facts[SCRIPT]}; go on with `hpcdl run`" if SCRIPT in facts else "`hpcdl train`"
        raise UsageError(f"{run_dir} is a run of {command}")
    try:
        loaded = load(kind, [Layer(origin=str(path), values=document)])
    except ConfigError as error:
        raise CorruptError(f"{path} is damaged: {'; '.join(error.problems)}") from None
    return Effective(config=loaded.config, origins={**loaded.origins, **origins}), facts
