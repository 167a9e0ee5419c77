"""Keep of a run what the gallery shows: `python -m docs.generated.committed_run RUN ..` writes docs/runs/<recipe>/.

Kept are the last metrics, how the run was made, and up to four of its figures: what was learned first, then the curves
of evaluation, then those of training. Figures are reduced to a palette of 64 colours.
"""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image

RUNS = Path(__file__).parents[1] / "runs"
NUM_FIGURES = 4
WIDTH = 900
_LAST = ("evaluation-", "training-", "loss-")


def keep(run: Path) -> Path:
    """Write what is kept of a run, and return its folder.

    Args:
        run: a run's folder.
    """
    summary, origin = (json.loads((run / name).read_text()) for name in ("summary.json", "provenance.json"))
    recipe = Path(origin["recipe_path"]).stem
    folder = RUNS / recipe
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*"):
        old.unlink()
    figures = chosen(sorted((run / "report").glob("*.png")))
    for figure in figures:
        _reduced(figure).save(folder / figure.name, optimize=True)
    kept: dict[str, Any] = {
        "command": origin["command"].split("mlotool", 1)[-1].join(["mlotool", ""]),
        "commit": origin["git"].get("commit"),
        "versions": {name: origin["versions"][name] for name in ("mlotool", "torch", "pytorch-lightning")},
        "date": origin["finished"][:10],
        "seconds": round(origin["duration_s"], 1),
        "seed": origin["seed"],
        "metrics": {name: value for name, value in summary["metrics"].items() if not name.endswith(("/step", "/lr"))},
        "figures": [figure.name for figure in figures],
    }
    (folder / "run.json").write_text(json.dumps(kept, indent=2) + "\n")
    return folder


def chosen(figures: list[Path]) -> list[Path]:
    """Return the figures that are kept, in the order in which they are shown."""

    def rank(figure: Path) -> tuple[int, str]:
        return next((place for place, name in enumerate(_LAST, 1) if figure.name.startswith(name)), 0), figure.name

    return sorted(figures, key=rank)[:NUM_FIGURES]


def _reduced(figure: Path) -> Image.Image:
    picture = Image.open(figure).convert("RGB")
    picture.thumbnail((WIDTH, WIDTH))
    return picture.quantize(colors=64)


if __name__ == "__main__":
    for each in sys.argv[1:]:
        print(keep(Path(each)))
