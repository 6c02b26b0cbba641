"""Measurements that a user can run, one file each."""
