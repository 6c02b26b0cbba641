"""The knobs of a node: what a profile may hold, what each is called, and which values it may take."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdl.config.settings import ALLOCATORS, Setting, setting, settings_of
from hpcdl.core.errors import ConfigError, suggestion

BINDINGS = ("compact", "scatter", "balanced", "numa", "devices", "none")
MEMORY_POLICIES = ("default", "membind", "membind-fast", "preferred-fast", "interleave")
ISA_CAPS = ("default", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16", "AVX512_CORE_AMX")
FPMATH_MODES = ("default", "BF16")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One way to use a node; None and `default` leave a knob as TensorFlow, the engine and the kernel have it."""

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
    """Settings from raw values by name (`-` and `_` alike). ConfigError holds every problem found, behind `origin`."""
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
    """The settings that differ from `Settings()`, and those that say how many: for files and tables."""
    plain = Settings()
    return {
        name: value for name, value in dataclasses.asdict(settings).items() if value is not None and
        (value != getattr(plain, name) or name in ("threads_per_core", "binding", "memory_policy"))
    }  # fmt: skip


def describe(settings: Settings) -> str:
    """The chosen settings on one line: `ranks_per_node=2 intra_op_threads=32 ...`."""
    return " ".join(f"{name}={show(value)}" for name, value in chosen(settings).items())


def show(value: Any) -> str:
    """A value as TOML and tables write it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def spelt(settings: Mapping[str, Any]) -> dict[str, str]:
    """Settings by name, their values as text."""
    return {name: show(value) for name, value in settings.items()}
