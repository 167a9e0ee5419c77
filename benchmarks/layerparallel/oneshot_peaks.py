"""One-shot training against serial training on the peaks data, iteration by iteration.

    python -m benchmarks.layerparallel.oneshot_peaks

The top row of figure 7 of Günther et al. 2020 (arXiv 1812.04352): training loss and validation accuracy over
iterations. Both take the recipe oneshot_peaks from the same start; serial is `problems.classifier.parallel=null`. Says
after how many iterations each first has the serial training's last validation accuracy (less half a percent).
"""

import argparse
from typing import Any

import matplotlib.pyplot as plt

import mlotool
from benchmarks.harness import record
from mlotool import Schedule
from mlotool.config import build
from mlotool.runner.evaluation import Evaluator

NAME = "layerparallel_oneshot_peaks"
RIVALS = {"serial": ("problems.classifier.parallel=null",), "one-shot": ()}
MARGIN = 0.005


def main() -> None:
    options = _options()
    found = [compare(seed, options.overrides) for seed in options.seeds]
    for each in found:
        print(each["seed"], each["iterations"], each["last"])
    print(record.write(NAME, {"overrides": options.overrides, "runs": found, **record.surroundings()}))
    draw(found[0]["curves"])


def compare(seed: int, overrides: list[str]) -> dict[str, Any]:
    """Return both rivals' curves from one start, and after how many iterations each has what is wanted."""
    curves = {name: train([*overrides, f"seed={seed}", *own]) for name, own in RIVALS.items()}
    last = {name: curve["val_accuracy"][-1] for name, curve in curves.items()}
    wanted = last["serial"] - MARGIN
    reached = {name: first(curve, wanted) for name, curve in curves.items()}
    return {"seed": seed, "wanted": wanted, "iterations": reached, "last": last, "curves": curves}


def train(overrides: list[str]) -> dict[str, list[Any]]:
    """Return the losses by iteration, and the validation accuracies with theirs."""
    config = mlotool.compose("oneshot_peaks", [*overrides, "logger=csv"])
    built = build(config)
    schedule, module = Schedule(built.program), built.program.problems["classifier"].module
    evaluator = Evaluator(module, built.data, ["accuracy"], 1000)
    found: dict[str, list[Any]] = {"loss": [], "iteration": [], "val_accuracy": []}
    for tick in range(1, config.runner.max_ticks + 1):
        found["loss"].append(round(float(schedule.tick()["classifier"].loss), 5))
        if tick % 10 == 0:
            found["iteration"].append(tick)
            found["val_accuracy"].append(round(evaluator.evaluate("val")["val/accuracy"], 4))
    return found


def first(curve: dict[str, list[Any]], wanted: float) -> int | None:
    """Return the first iteration with that validation accuracy."""
    pairs = zip(curve["iteration"], curve["val_accuracy"], strict=True)
    return next((tick for tick, accuracy in pairs if accuracy >= wanted), None)


def draw(curves: dict[str, dict[str, list[Any]]]) -> None:
    """Draw losses (solid) and validation accuracies (dashed)."""
    figure, left = plt.subplots(figsize=(6, 4))
    right = left.twinx()
    for (name, curve), color in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        left.plot(range(1, len(curve["loss"]) + 1), curve["loss"], color=color, label=f"{name}: loss")
        right.plot(curve["iteration"], curve["val_accuracy"], "--", color=color, label=f"{name}: val accuracy")
    left.set(xlabel="iteration", ylabel="training loss (solid)", yscale="log")
    right.set(ylabel="validation accuracy (dashed)", ylim=(0, 1))
    lines = [*left.get_lines(), *right.get_lines()]
    left.legend(lines, [str(line.get_label()) for line in lines], loc="center right", fontsize=8)
    figure.tight_layout()
    figure.savefig(record.RESULTS / f"{NAME}.png", dpi=150)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="the first one is drawn")
    parser.add_argument("overrides", nargs="*", help="of both")
    return parser.parse_args()


if __name__ == "__main__":
    main()
