"""A script as one rank among many: how it begins, what is known of it, how it ends."""
