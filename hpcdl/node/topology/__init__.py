"""What a node is made of: from hwloc, from sysfs, or from a machine's file; and a drawing of it."""
