"""Runs each named script, one after the other in one process, and reports which leave ranks with other weights."""

import runpy
import sys
import time

import hpcdl
from hpcdl.supervision import runtime

hpcdl.init(60)
runtime.import_tensorflow()
import keras
import numpy

for path in sys.argv[1:]:
    began = time.monotonic()
    keras.backend.clear_session()
    try:
        model = runpy.run_path(path, run_name="__main__")["model"]
        flat = numpy.concatenate([weight.numpy().reshape(-1) for weight in model.weights]).astype("float32")
        rows = hpcdl.allgather_object(flat.tobytes().hex())
        word = "alike" if len(set(rows)) == 1 and numpy.isfinite(flat).all() else "DIFFER"
    except Exception as error:  # noqa: BLE001  the next script is to run all the same
        word = f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if hpcdl.rank() == 0:
        print(f"{path.rpartition('/')[2]} {word} {time.monotonic() - began:.1f}", flush=True)
