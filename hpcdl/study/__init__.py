"""Many runs as one study: trials of a node, matrices of runs."""
