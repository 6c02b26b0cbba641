"""Run hpcdl's command lines from stdin, one JSON list per line, in one process of another user.

Each is what `hpcdl ARGUMENTS` calls, in its named folder and environment; only imports are shared.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from hpcdl.cli.main import run


def answer(arguments: list[str], folder: str) -> tuple[int, str, str]:
    """Return exit code and output, captured by file descriptor: libraries outside Python print too."""
    os.chdir(folder)
    kept, printed = [os.dup(1), os.dup(2)], []
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            code = run(arguments)
        except Exception as error:  # noqa: BLE001  a traceback is what the test is about
            code, text = 1, f"Traceback: {error!r}\n"
            sys.stderr.write(text)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, descriptor in enumerate(kept, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
    return code, printed[0], printed[1]


if __name__ == "__main__":
    home = Path.cwd()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(*json.loads(line))) + "\n")
        sys.stdout.flush()
        os.chdir(home)
