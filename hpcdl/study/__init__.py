"""Many runs as one study: trials of a node and matrices of runs."""
