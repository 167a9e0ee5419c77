"""A cycle of Meta-Weight-Net with WRN-28-10, beside Betty and a loop by hand."""

from benchmarks.gpu.cycles import check

CHECK = check("Time and memory of a cycle: WRN-28-10", "wrn28_10", 40, 180.0)
