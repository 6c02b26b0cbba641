"""How ranks start on the nodes of a job; one file a launcher."""
