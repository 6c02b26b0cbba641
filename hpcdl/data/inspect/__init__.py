"""What a data folder holds, and whether every byte is right."""
