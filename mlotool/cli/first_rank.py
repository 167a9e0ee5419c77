"""Which of several processes speaks for a run; without torch."""

import os


def is_first_rank() -> bool:
    """Say whether this process is alone, or rank 0 of those that torchrun or SLURM has started."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
