"""An environment of a user's own on top of an installation of hpcdl: how it is known, and what it stands on.

`hpcdl env create` makes one (cluster/own_env.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

from hpcdl.core.errors import CorruptError
from hpcdl.core.storage.files import read_json

MARK = "hpcdl-env.json"
"""In the environment's folder; its `base` is the installation's environment."""
STAGED = "hpcdl-base"
"""Of a copy on a node's storage: the folder in it that holds what the environment stands on (cluster/stage_env.py)."""


def base_of(prefix: Path = Path(sys.prefix)) -> Path | None:
    """The environment that the one at `prefix` stands on; None where it stands alone.

    CorruptError where its mark says something else.
    """
    mark = prefix / MARK
    if not mark.is_file():
        return None
    base = read_json(mark).get("base")
    if not isinstance(base, str):
        raise CorruptError(f"{mark} names no environment; make it anew with `hpcdl env create`")
    return Path(base)
