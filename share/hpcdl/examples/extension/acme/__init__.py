"""A centre's own additions to hpcdl."""
