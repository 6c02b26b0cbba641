"""Code that every package may use; nothing here imports a heavy library."""
