"""A cycle of Meta-Weight-Net with ResNet-32, beside Betty and a loop by hand."""

from benchmarks.gpu.cycles import check

CHECK = check("Time and memory of a cycle: ResNet-32", "resnet32", 21, 120.0)
