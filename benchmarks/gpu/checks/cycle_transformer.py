"""A cycle of Meta-Weight-Net with a small transformer, beside Betty and a loop by hand."""

from benchmarks.gpu.cycles import check

CHECK = check("Time and memory of a cycle: a small transformer", "transformer", 22, 120.0)
