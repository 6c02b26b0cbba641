"""Requests per file to the file system's metadata server when sharding a folder of image files.

    python benchmarks/shard_metadata.py [--files 100000] [--classes 100] [--links] [--folder DIR]

Makes small PNG files in a folder for each class (`--links`: links to files elsewhere), runs `hpcdl shard` on them under
`strace -f`, and counts the calls that name a file of the source: stats, opens, and listings of folders.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

_CALL = re.compile(r'(?:\d+ +)?(\w+)\((?:AT_FDCWD, )?"([^"]*)"')
_STATS = ("newfstatat", "statx", "stat", "lstat", "access", "faccessat", "faccessat2", "readlink", "readlinkat")
_OPENS = ("open", "openat", "openat2")


def pictures(source: Path, files: int, classes: int, elsewhere: Path | None) -> None:
    """Write `files` PNG files of 8 x 8 pixels, or links to such files."""
    for number in range(files):
        content = io.BytesIO()
        Image.new("L", (8, 8), number % 251).save(content, "png")
        name = Path(f"c{number % classes}") / f"{number}.png"
        place = (elsewhere or source) / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.getvalue())
        if elsewhere:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to(place)


def main() -> None:
    """Count and print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--links", action="store_true")
    parser.add_argument("--folder", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder, prefix="hpcdl-metadata-") as scratch:
        folder = Path(scratch)
        pictures(folder / "source", chosen.files, chosen.classes, folder / "files" if chosen.links else None)
        trace = folder / "trace"
        tracer = ["strace", "-f", "-qq", "-e", "trace=%file", "-e", "signal=none", "-s", "4096", "-o", str(trace)]
        line = [sys.executable, "-m", "hpcdl", "shard", str(folder / "source"), str(folder / "data")]
        subprocess.run([*tracer, *line], check=True, capture_output=True)
        stats = opens = listings = 0
        with trace.open(errors="replace") as lines:
            for text in lines:
                call = _CALL.match(text)
                if call is None or not call[2].startswith(f"{folder / 'source'}"):
                    continue
                is_file = call[2].endswith(".png")
                stats += is_file and call[1] in _STATS
                opens += is_file and call[1] in _OPENS
                listings += not is_file and call[1] in _OPENS
    print(json.dumps({
        "files": chosen.files,
        "stats_a_file": round(stats / chosen.files, 3),
        "opens_a_file": round(opens / chosen.files, 3),
        "listings_a_class": round(listings / chosen.classes, 2),
    }, indent=1))  # fmt: skip


if __name__ == "__main__":
    main()
