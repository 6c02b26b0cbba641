"""Peak memory of `hpcdl shard` for Parquet and CSV files of several sizes, and its rate of writing.

    python benchmarks/shard_memory.py [--mib 100 400] [--kinds parquet-numbers parquet-images csv] [--folder DIR]

The files are written some rows at a time; a Parquet file has row groups of 64 MiB, as Spark and pandas make them. The
peak is that of the largest process, VmHWM.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

_GROUP = 64 << 20
_COLUMNS = 128
_PEAK = """
import pathlib, re, sys
from hpcdl.cli.main import run
code = run(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


def parquet_numbers(path: Path, num_bytes: int) -> list[str]:
    """Columns of float64 and a class."""
    rng, rows = np.random.default_rng(0), _GROUP // (8 * _COLUMNS)
    made = None
    for _ in range(max(1, num_bytes // _GROUP)):
        columns = {f"a{place}": rng.random(rows) for place in range(_COLUMNS)}
        table = pa.table({**columns, "label": rng.integers(0, 10, rows)})
        made = made or pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False)
        made.write_table(table, row_group_size=rows)
    if made:
        made.close()
    return []


def parquet_images(path: Path, num_bytes: int) -> list[str]:
    """PNG files of 100 kB, stored as in Hugging Face's data sets."""
    rng, contents = np.random.default_rng(0), []
    for _ in range(16):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (184, 184, 3), dtype=np.uint8)).save(file, "png")
        contents.append(file.getvalue())
    rows = _GROUP // len(contents[0])
    made = None
    for _ in range(max(1, num_bytes // _GROUP)):
        images = [{"bytes": contents[number % 16], "path": f"{number}.png"} for number in range(rows)]
        table = pa.table({"image": images, "label": [number % 10 for number in range(rows)]})
        made = made or pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False)
        made.write_table(table, row_group_size=rows)
    if made:
        made.close()
    return ["--encoding", "encoded"]


def csv(path: Path, num_bytes: int) -> list[str]:
    """Columns of decimal numbers, and a class in words; the same 4096 rows repeated."""
    rng = np.random.default_rng(0)
    names = ",".join(f"a{place}" for place in range(_COLUMNS))
    with path.open("w") as file:
        file.write(f"{names},label\n")
        rows = rng.random((4096, _COLUMNS)).round(6).tolist()
        text = "".join(f"{','.join(map(str, row))},class {int(row[0] * 10)}\n" for row in rows)
        for _ in range(-(-num_bytes // len(text))):
            file.write(text)
    return []


KINDS: dict[str, tuple[str, Callable[[Path, int], list[str]]]] = {
    "parquet-numbers": (".parquet", parquet_numbers),
    "parquet-images": (".parquet", parquet_images),
    "csv": (".csv", csv),
}


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    result = []
    for kind in chosen.kinds:
        ending, make = KINDS[kind]
        for mib in chosen.mib:
            with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="hpcdl-memory-") as scratch:
                path = Path(scratch) / f"source{ending}"
                flags = make(path, mib << 20)
                line = [sys.executable, "-c", _PEAK, "shard", str(path), str(Path(scratch) / "data"), "--workers", "1"]
                began = time.monotonic()
                done = subprocess.run([*line, *flags], check=True, capture_output=True, text=True)
                result.append({
                    "kind": kind,
                    "file_mib": path.stat().st_size >> 20,
                    "peak_mib": int(done.stdout.split()[-1]) >> 10,
                    "seconds": round(time.monotonic() - began, 1),
                })  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
