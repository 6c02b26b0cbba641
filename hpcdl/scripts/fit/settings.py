"""Whether the ranks train with the same settings: drawn at random on each, as a search does, they would differ unseen.

A learning rate becomes rank 0's, and of two activations each rank would train its own: nothing else would show it.
"""

from __future__ import annotations

import contextlib
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpcdl.scripts.process.session import warn_once

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup

_OWN = {"name", "seed", "optimizer", "build_config"}
"""Settings that may differ: Keras numbers names as it makes them, an optimizer is compared by itself, and what was
adapted keeps the number of a rank's samples."""
_LONGEST = 60


def settings_of_model(model: Any) -> dict[str, Any]:
    """Return the settings of a compiled model, as far as it has them: a subclass may not."""
    settings: dict[str, Any] = {}
    for make in (model.get_config, model.get_compile_config):
        # A script's own classes may raise anything. Keras warns of functions that a saved model could not hold.
        with contextlib.suppress(Exception), warnings.catch_warnings(action="ignore"):
            settings |= make() or {}
    return settings


def warn_of_other_settings(group: ScriptGroup, what: str, settings: Mapping[str, Any]) -> None:
    """Warn if the ranks have different settings of an optimizer or a model. Collective."""
    if group.size == 1:
        return
    group.agree("the settings of an optimizer or a model")
    local = dict(_leaves(settings))
    # Numbers first: the settings of a large model travel only if they differ.
    if len(set(group.messages.allgather_json(zlib.crc32(repr(local).encode())))) == 1:
        return
    first, *others = group.messages.allgather_json(local)
    for rank, other in enumerate(others, 1):
        for name in [*first, *other]:
            if first.get(name) != other.get(name):
                warn_once(
                    group,
                    f"settings of {what}",
                    f"{what} has {name} {first.get(name, 'unset')} on rank 0, {other.get(name, 'unset')} on rank "
                    f"{rank}: all ranks train one model; choose settings alike, from one seed or with "
                    "hpcdl.broadcast_object",
                )
                return


def _leaves(settings: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Return the path and the beginning of the text of every setting."""
    pairs: Any = ()
    if isinstance(settings, Mapping):
        pairs = settings.items()
    elif isinstance(settings, list | tuple):
        pairs = enumerate(settings)
    else:
        text = f"{settings:.6g}" if isinstance(settings, float) else str(settings)
        yield path, re.sub("0x[0-9a-f]+", "0x", text)[:_LONGEST]  # addresses differ on every rank
    for name, value in pairs:
        if name not in _OWN:
            # Keras puts the settings of every object into its `config`: the word would only lengthen the path.
            yield from _leaves(value, path if name == "config" else f"{path}/{name}".lstrip("/"))
