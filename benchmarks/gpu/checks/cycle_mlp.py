"""A cycle of Meta-Weight-Net with an MLP, beside Betty and a loop by hand."""

from benchmarks.gpu.cycles import check

CHECK = check("Time and memory of a cycle: an MLP", "mlp", 20, 90.0)
