"""`hpcdl tune-threads`: the settings of a node, found by measuring."""
