"""Workers that take many steps by themselves and average their weights now and then: local SGD, SlowMo, DiLoCo."""
