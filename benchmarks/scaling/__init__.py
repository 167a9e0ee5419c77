"""Two ranks against one: times, what they tell each other, and memory."""

import os

# Before torch is imported. Threads that spin while they wait make two of them many times slower than one wherever
# something else wants the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
