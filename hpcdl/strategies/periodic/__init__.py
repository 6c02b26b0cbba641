"""Workers that take many steps between averages of their weights: local SGD, SlowMo, DiLoCo."""
