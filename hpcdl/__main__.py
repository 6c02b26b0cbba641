"""`python -m hpcdl` is the `hpcdl` command."""

import sys

# `-m` puts the current folder first on the path; nothing may be read from there unasked.
if not sys.flags.safe_path:
    del sys.path[0]

from hpcdl.cli import command

if __name__ == "__main__":
    command()
