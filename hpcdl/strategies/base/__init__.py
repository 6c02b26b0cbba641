"""What every strategy builds on: the protocol, the graph of an exchange, checks of finite values."""
