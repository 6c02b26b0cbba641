"""What a data folder holds, to look at: counted and drawn into one page."""
