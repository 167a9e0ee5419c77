"""`mlotool rank`: one process of a run on several devices. `mlotool run` starts it; it is no verb for users."""

from collections.abc import Sequence
from pathlib import Path


def main(words: Sequence[str]) -> int:
    """Run the request in the folder that is named."""
    from mlotool.runner.run_config import serve

    [folder] = words
    return serve(Path(folder))
