"""The networks, one file each; hpcdl/models/table.py lists them without importing Keras."""
