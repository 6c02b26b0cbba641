"""What must change in a script for Horovod so that it trains with hpcdl on Keras 3; read, never run."""
