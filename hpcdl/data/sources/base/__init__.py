"""What the formats share: the listing of samples, fields, folders, and the names that say splits."""
