"""What Sun et al. 2021 (arXiv 2112.05387) report of their and other methods, as they print it."""

CIFAR10 = {
    "source": "Table 9: CIFAR-10, ResNet-110 in K=3 pieces; speed-up over serial training by equation 27",
    "rows": {
        "BP": {"accuracy": 93.7, "speedup": None},
        "Penalty": {"accuracy": 84.5, "speedup": 1.56},
        "DDG": {"accuracy": 93.4, "speedup": 0.81},
        "FR": {"accuracy": 93.8, "speedup": 0.63},
        "AuxNet (theirs)": {"accuracy": 92.5, "speedup": 1.45},
    },
}
IMAGENET = {
    "source": "Table 11: ImageNet, ResNet-50 in K=2 pieces, AuxNet of ResNet-18",
    "rows": {
        "BP": {"accuracy": 76.5, "speedup": None},
        "FR": {"accuracy": 74.4, "speedup": 0.70},
        "Sync-DGL": {"accuracy": 73.5, "speedup": 1.44},
        "AuxNet (theirs)": {"accuracy": 74.6, "speedup": 1.40},
    },
}
"""DGL stands in this table only: Table 9 has no row of it."""
STAGES = {
    "source": "Table 7: CIFAR-10, ResNet-110, AuxNet of ResNet-20",
    "rows": {
        "K=2": {"accuracy": 92.8, "speedup": 1.26},
        "K=3": {"accuracy": 92.5, "speedup": 1.45},
        "K=4": {"accuracy": 91.8, "speedup": 1.68},
    },
}
TABLES = (CIFAR10, IMAGENET, STAGES)
