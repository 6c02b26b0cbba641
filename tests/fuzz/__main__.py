"""`python -m tests.fuzz KIND CASE` repeats one mutation; `python -m tests.fuzz [KIND] xN` runs N of each kind."""

import sys

from tests.fuzz.batches import main

sys.exit(main(sys.argv[1:]))
