"""What every strategy builds on: the protocol, the graph of an exchange, checks for finite values."""
