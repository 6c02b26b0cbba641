"""Runs on every rank: the scripts of from_horovod/ one after the other; FOLDER/<rank>.json says how each ended."""

import hashlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import hpcdl
from hpcdl.supervision import runtime

hpcdl.init()
runtime.import_tensorflow()
folder = Path(sys.argv[1])
os.environ["OUT"] = str(folder)
ended = {}
for script in sorted((Path(__file__).parent / "from_horovod").glob("*.py")):
    try:
        model = runpy.run_path(str(script))["model"]
        ended[script.stem] = hashlib.sha256(b"".join(one.numpy().tobytes() for one in model.weights)).hexdigest()
    except Exception:  # noqa: BLE001  the test tells which script it was
        ended[script.stem] = traceback.format_exc()
(folder / f"{hpcdl.rank()}.json").write_text(json.dumps(ended))
hpcdl.shutdown()
