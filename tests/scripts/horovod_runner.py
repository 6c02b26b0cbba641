"""Runs on every rank: FOLDER, then scripts, one after the other; FOLDER/<rank>.json says how each ended."""

import hashlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import hpcdl
from hpcdl.core.errors import HpcdlError
from hpcdl.supervision import runtime

hpcdl.init()
runtime.import_tensorflow()
folder = Path(sys.argv[1])
os.environ["OUT"] = str(folder)
ended = {}
for script in map(Path, sys.argv[2:]):
    try:
        left = runpy.run_path(str(script))
        digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in left["model"].weights)).hexdigest()
        state = left.get("state")
        ended[script.stem] = [digest] if state is None else [digest, state.epoch, state.batch]
    except HpcdlError:  # a rank is lost: `hpcdl run --elastic` starts again
        raise
    except Exception:  # noqa: BLE001  the test tells which script it was
        ended[script.stem] = [traceback.format_exc()]
(folder / f"{hpcdl.rank()}.json").write_text(json.dumps(ended))
hpcdl.shutdown()
