"""Layer-parallel training beside serial training and pipelines: times, and the length of the critical path."""

import os

# Before torch is imported. Threads that spin while they wait make two of them many times slower than one wherever
# something else wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
