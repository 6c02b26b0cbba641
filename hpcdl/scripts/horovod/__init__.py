"""Find what must change in a Horovod script so that it trains with hpcdl on Keras 3. Scripts are read, never run."""
