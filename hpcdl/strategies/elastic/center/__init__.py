"""The center's side: a server, its rules, its messages."""
