"""Let one rank download, and unpack, what all ranks ask `keras.utils.get_file` for, as `keras.datasets` do.

Keras takes a file that exists for whole, and unpacks an archive at each call: a rank would read what another is still
writing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpcdl.comm.agree import decided
from hpcdl.core.storage.disk import make_folder, publish, touch
from hpcdl.scripts.process.undistributed import after_import
from hpcdl.scripts.process.written import saving_for_all

if TYPE_CHECKING:
    from hpcdl.comm.observed import Observed

_LOOK_S = 0.1


def download_once(communicator: Observed, folder: Path | None, is_rank: Callable[[], bool]) -> None:
    """Patch `get_file`, at its import. `folder`: one for notes that all ranks see, None for one rank. Collective."""
    if folder is None:
        return
    # A run that was killed in a download leaves its note: when it is resumed, nobody would end the wait for that.
    start = decided(communicator, lambda: uuid.uuid4().hex[:8])

    forced: Counter[str] = Counter()

    def of_files(module: ModuleType) -> None:
        plain = module.get_file

        @functools.wraps(plain)
        def get_file(*args: Any, **kwargs: Any) -> Any:
            digest = hashlib.blake2b(repr((args, sorted(kwargs.items()))).encode(), digest_size=8).hexdigest()
            if kwargs.get("force_download"):  # each call downloads again, once for all ranks
                forced[digest] += 1
                digest = f"{digest}-{forced[digest]}"
            # Of all ranks one, then one of each node with storage of its own.
            note = folder / f"download-{start}-{digest}"
            notes = [note, note.with_name(f"{note.name}-{communicator.host}")]
            for note in notes if is_rank() else []:
                if _begins(note, communicator):
                    path = None
                    try:
                        with saving_for_all():  # the next one another rank may make
                            path = plain(*args, **kwargs)
                        return path
                    finally:  # after an error the others try it themselves
                        touch(note, json.dumps(_file(path)).encode())
                if _file((found := json.loads(note.read_text()))[0]) == found != _NONE:
                    return found[0]
            return plain(*args, **kwargs)

        for name, other in list(sys.modules.items()):
            if name.partition(".")[0] == "keras" and vars(other).get("get_file") is plain:
                vars(other)["get_file"] = get_file

    after_import("keras.src.utils.file_utils", of_files)


_NONE = [None, 0]


def _file(path: str | None) -> list[Any]:
    """Return the path and the inode of a file or folder: nodes may have others of this name."""
    return [str(Path(path).absolute()), Path(path).stat().st_ino] if path and Path(path).exists() else _NONE


def _begins(note: Path, communicator: Observed) -> bool:
    """Return whether this rank is to download now; False once another rank has."""
    make_folder(note.parent)
    if publish(note, str(communicator.rank).encode()):
        return True
    while (text := note.read_text()).isdigit():
        # Asked again and again: a shared file system does not report what other nodes change.
        with communicator.monitor.waiting_for("a download", (int(text),)):
            time.sleep(_LOOK_S)
    return False
