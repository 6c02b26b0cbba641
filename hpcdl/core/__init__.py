"""What every room may use; nothing here imports a heavy library."""
