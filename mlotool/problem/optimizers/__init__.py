"""How optimizers step: one rule a file, `registry.py` by class, and what takes steps by them."""
