"""One file per network; hpcdl/models/table.py lists them without importing Keras."""
