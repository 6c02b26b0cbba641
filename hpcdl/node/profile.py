"""Profiles: the settings of a node, the results of `tune-threads` for node type and model, and the choice for a run."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.config.settings import ALLOCATORS, Setting, setting, settings_of
from hpcdl.core.errors import ConfigError, UsageError, suggestion
from hpcdl.core.paths import share_folder, user_config_folder
from hpcdl.core.records.from_json import from_json
from hpcdl.core.storage.disk import make_folder
from hpcdl.core.storage.files import read_toml, toml_text, write_output
from hpcdl.core.units import IMAGES
from hpcdl.node.accelerators import described
from hpcdl.node.engine import installed
from hpcdl.node.topology import Topology

BINDINGS = ("compact", "scatter", "balanced", "numa", "devices", "none")
MEMORY_POLICIES = ("default", "membind", "membind-fast", "preferred-fast", "interleave")
ISA_CAPS = ("default", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_AMX")
FPMATH_MODES = ("default", "BF16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One way to use a node; None and `default` keep the choice of TensorFlow, the engine and the kernel."""

    ranks_per_node: int | None = setting(None, "Ranks that share the node.", at_least=1)
    intra_op_threads: int | None = setting(None, "Threads of one operation, per rank.", at_least=1)
    inter_op_threads: int | None = setting(None, "Operations at a time, per rank.", at_least=1)
    threads_per_core: int = setting(1, "Hardware threads used on each core.", at_least=1)
    binding: str = setting("balanced", "How ranks sit on cores.", choices=BINDINGS)
    free_cores: int = setting(0, "Cores left to the system and MPI, the highest ones.", at_least=0)
    memory_policy: str = setting("default", "Where memory comes from.", choices=MEMORY_POLICIES)
    onednn: bool | None = setting(None, "Whether TensorFlow computes with oneDNN.")
    onednn_isa: str = setting("default", "Highest instruction set that oneDNN uses.", choices=ISA_CAPS)
    onednn_fpmath: str = setting("default", "Precision that oneDNN may compute float32 in.", choices=FPMATH_MODES)
    allocator: str = setting("default", "Memory allocator.", choices=ALLOCATORS)
    xla: bool = setting(False, "Whether graphs are compiled by XLA.")
    kmp_blocktime: int | None = setting(
        None, "Milliseconds that OpenMP threads spin (MKL/OpenMP builds).", at_least=0, at_most=100_000
    )
    batch_size: int | None = setting(None, "Samples per rank and step.", at_least=1)


SETTINGS: dict[str, Setting] = {item.name: item for item in settings_of(Settings)}


def settings_from(values: Mapping[str, Any], *, origin: str) -> Settings:
    """Parse settings by name (`-` and `_` are equal). Raises ConfigError with every problem, prefixed with `origin`."""
    problems: list[str] = []
    parsed: dict[str, Any] = {}
    for key, raw in values.items():
        name = key.replace("-", "_")
        if name not in SETTINGS:
            problems.append(f"{origin}: unknown setting {key!r}{suggestion(name, SETTINGS)}")
            continue
        try:
            parsed[name] = SETTINGS[name].parse(raw)
        except ValueError as error:
            problems.append(f"{origin}: {key}: {error}")
    if problems:
        raise ConfigError(problems)
    return Settings(**parsed)


def chosen(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from `Settings()`, and some that are always shown: for files and tables."""
    plain = Settings()
    return {
        name: value for name, value in dataclasses.asdict(settings).items() if value is not None and
        (value != getattr(plain, name) or name in ("threads_per_core", "binding", "memory_policy"))
    }  # fmt: skip


def describe(settings: Settings) -> str:
    """Return the chosen settings on one line: `ranks_per_node=2 intra_op_threads=32 ...`."""
    return " ".join(f"{name}={show(value)}" for name, value in chosen(settings).items())


def show(value: Any) -> str:
    """Return a value as TOML and tables write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def spelt(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings by name, with their values as text."""
    return {name: show(value) for name, value in settings.items()}


SCHEMA = "hpcdl.profile/1"


@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """One measured candidate: images/s over `n` samples, or why there are none.

    `origin` is the source of the advice, if any.
    """

    settings: Mapping[str, Any]
    status: str
    n: int = 0
    images_per_second: float | None = None
    ci95: float | None = None
    memory_bytes_per_rank: int | None = None
    message: str = ""
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The result of a search; `counted` is the unit of its rates, `picture` draws the node with its ranks.

    `devices` is the number of GPUs that the ranks shared, by the name of their kind; empty if they computed on CPUs.
    `sentence` explains why it was chosen; it and `path` are not stored.
    """

    settings: Settings
    machine: str
    processor: str
    fingerprint: str
    num_cores: int
    model: str
    batch_size: int
    images_per_second: float | None = None
    counted: str = IMAGES
    ci95: float | None = None
    n: int = 0
    verdict: str = ""
    created_at: str = ""
    engine: str = ""
    software: Mapping[str, str] = field(default_factory=dict)
    devices: Mapping[str, int] = field(default_factory=dict)
    trials: Sequence[TrialSummary] = ()
    picture: Sequence[str] = ()
    path: Path | None = None
    sentence: str = ""


def user_folder() -> Path:
    """Return the folder of the user's profiles."""
    return user_config_folder() / "profiles"


def site_folder() -> Path:
    """Return the folder of the site's profiles."""
    return share_folder() / "profiles"


def file_name(profile: Profile) -> str:
    """Return `<fingerprint>[-<devices>]-<model>.toml`, with safe characters for shells and file systems."""
    parts = (profile.fingerprint, _plain(described(profile.devices)) if profile.devices else "", _plain(profile.model))
    return f"{'-'.join(filter(None, parts))}.toml"


def write_profile(profile: Profile, path: Path) -> None:
    """Write `profile` to `path`, atomically. Raises UsageError for an unwritable folder, or a file that is not ours."""
    try:
        make_folder(path.parent)
        write_output(path, toml_text(as_document(profile)))
    except OSError as error:
        where = error.filename or path
        raise UsageError(f"cannot write profile {where}: {error.strerror}; choose another with --out FILE") from None


def as_document(profile: Profile) -> dict[str, Any]:
    """Return `profile` in types that TOML has; unset values are omitted."""
    document: dict[str, Any] = {"schema": SCHEMA}
    for entry in dataclasses.fields(profile):
        value = getattr(profile, entry.name)
        if (
            value is not None
            and value != {}
            and entry.name not in ("settings", "trials", "picture", "path", "sentence")
        ):
            document[entry.name] = dict(value) if isinstance(value, Mapping) else value
    if profile.picture:
        document["picture"] = list(profile.picture)
    document["settings"] = chosen(profile.settings)
    document["trials"] = [
        {key: value for key, value in dataclasses.asdict(trial).items() if value is not None and value != ""}
        for trial in profile.trials
    ]
    return document


def read_profile(path: Path) -> Profile:
    """Return the profile in `path`. Raises UsageError or ConfigError if it is missing or invalid.

    A file without TOML, of another schema or with unknown settings is invalid: profiles never hold raw environment.
    """
    document = read_toml(path)
    found_schema = document.pop("schema", None)
    if found_schema != SCHEMA:
        raise UsageError(
            f"{path} has schema {found_schema!r}, this hpcdl reads {SCHEMA!r}; make one with `hpcdl tune-threads`"
        )
    raw = document.pop("settings", None)
    if not isinstance(raw, dict):
        raise UsageError(f"{path} has no table [settings]; make it again with `hpcdl tune-threads`")
    settings = settings_from(raw, origin=str(path))
    missing = sorted({"machine", "processor", "fingerprint", "num_cores", "model", "batch_size"} - set(document))
    kept = {key: value for key, value in document.items() if key not in ("path", "sentence")}
    try:
        if missing:
            raise TypeError(f"{missing[0]} is missing")
        _check_finite(document)
        # Settings are parsed above, where all problems are reported at once.
        profile = from_json(Profile, {**kept, "settings": {}})
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path} is damaged: {error}; make it again with `hpcdl tune-threads`") from None
    return dataclasses.replace(profile, settings=settings, path=path)


def _check_finite(document: Any) -> None:
    """Raise ValueError for a number that TOML has and JSON lacks, because a report holds profiles as JSON."""
    if isinstance(document, float) and not math.isfinite(document):
        raise ValueError(f"{document} is not a number that was measured")
    for value in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        _check_finite(value)


def find_profile(choice: str, model: str, topology: Topology, folders: Iterable[Path] | None = None) -> Profile | None:
    """Return the profile to use: `none`, a file, or with `auto` the best for node and model, else the nearest node's.

    Its `sentence` says which and why. `auto` never takes profiles of other node types, or of other GPUs than the node
    shows: a wrong thread count can cost more than none. It takes a profile of the node's CPUs if there is none of its
    GPUs, which TensorFlow may not see. A file that the user names is taken in any case, and `sentence` names the
    mismatch.
    """
    if choice == "none":
        return None
    if choice != "auto":
        profile = read_profile(Path(choice).expanduser())
        return dataclasses.replace(profile, sentence=_named(profile, topology, model))
    readable = _readable_profiles(folders if folders is not None else (user_folder(), site_folder()))
    stored = [profile for profile in readable if profile.devices in ({}, topology.devices)]

    def place(profile: Profile) -> tuple[bool, bool, tuple[int, ...]]:
        # False sorts first: the same devices, then the same model, then the newest.
        return profile.devices != topology.devices, profile.model != model, _minus(profile.created_at)

    here = [profile for profile in stored if profile.fingerprint == topology.fingerprint]
    if here:
        best = min(here, key=place)
        fits = best.model == model
        why = f"tuned on this node type{_with_devices(best, topology)} for {best.model}"
        why += "" if fits or not model else f"; there is none for {model}"
        return dataclasses.replace(best, sentence=_sentence(best, why))
    alike = [p for p in stored if p.processor == topology.processor and p.num_cores == len(topology.cores)]
    if alike:
        best = min(alike, key=place)
        why = f"nearest: same processor and number of cores{_with_devices(best, topology)}, but another layout"
        why += f" ({best.machine}, {best.model})"
        return dataclasses.replace(best, sentence=_sentence(best, why))
    return None


def _readable_profiles(folders: Iterable[Path]) -> list[Profile]:
    """Return every readable profile, the user's first; damaged ones are skipped, and `--profile FILE` reports why."""
    profiles = []
    for folder in folders:
        for path in sorted(folder.glob("*.toml")):
            try:
                profiles.append(read_profile(path))
            except (UsageError, ConfigError):
                continue
    return profiles


def _minus(created_at: str) -> tuple[int, ...]:
    """Return a sort key that puts later times first."""
    return tuple(-ord(letter) for letter in created_at)


def _named(profile: Profile, topology: Topology, model: str) -> str:
    if profile.fingerprint != topology.fingerprint:
        why = f"named by you, though tuned on another node type ({profile.processor}; here {topology.processor})"
    elif profile.devices != topology.devices:
        why = f"named by you, though tuned{_with_devices(profile, topology)}"
    elif profile.model != model:
        why = f"named by you, though tuned for {profile.model}"
    else:
        why = "named by you"
    return _sentence(profile, why)


def _with_devices(profile: Profile, topology: Topology) -> str:
    """Return the devices of the profile, and how they differ from those that the node shows."""
    if profile.devices == topology.devices:
        return f" with {described(profile.devices)}" if profile.devices else ""
    here = f"here are {described(topology.devices)}" if topology.devices else "here is no GPU"
    return f" {f'with {described(profile.devices)}' if profile.devices else 'on its CPUs alone'} ({here})"


def _sentence(profile: Profile, why: str) -> str:
    return f"profile {profile.path}: {why}{_doubts(profile)}; {describe(profile.settings)}"


UNSETTLED = "stopped before it settled"
"""Prefix of the verdict of a search that ran out of time."""


def _doubts(profile: Profile) -> str:
    """Return reasons for doubt that the settings are the fastest here, for `sentence`."""
    package, version = installed()
    doubts = [f"its search {profile.verdict}"] if profile.verdict.startswith(UNSETTLED) else []
    if profile.engine.startswith(f"{package} ") and not profile.engine.startswith(f"{package} {version} "):
        doubts.append(f"tuned under {profile.engine.partition(' (')[0]}, here is {version}: tune again")
    return "".join(f"; {doubt}" for doubt in doubts)


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(name)).strip(".-") or "model"  # noqa: PTH119  also `pkg:f`
