"""The table of measured hypergradients: `python -m docs.generated.hypergradients` writes it into its page."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hypergradients.md"
BEGIN, END = "<!-- hypergradients: python -m docs.generated.hypergradients -->", "<!-- end -->"
TASKS = ("logistic", "mwn_mlp", "mwn_resnet")
OPTIONS = {
    "Identity, finite differences (AID-FD)": "`finite_difference`, the default",
    "the same, stop_gradient": "`finite_difference`, with `stop_gradient` in the loss",
    "Identity, reverse (T1-T2)": "`identity`",
    "SAMA (OptimizerPreconditioner)": "`sama`",
    "Neumann": "`neumann`",
    "FixedPoint": "`fixed_point`",
    "ConjugateGradient": "`cg_convex`",
    "NormalEquationConjugateGradient": "`normal_cg`",
    "Nystrom": "`nystrom`",
    "KFAC": "`kfac`",
    "Exact": "`exact`",
    "Unrolled, remat": "`unrolled`",
    "Unrolled, graphs kept": "`unrolled`, with `hypergradient.remat=false`",
    "SOBA": "`soba`",
    "SABA": "`saba`",
    "Penalty, fixed (F2SA)": "`penalty`",
    "Penalty, barrier (BOME)": "`bome`",
    "EvolutionStrategies": "`evolution`",
}
"""What the benchmark calls an algorithm, and the option of conf/hypergradient/."""


def table() -> str:
    """Return the table, in Markdown."""
    measured = {task: _rows(task) for task in TASKS}
    base = {task: measured[task]["Identity, finite differences (AID-FD)"] for task in TASKS}
    lines = ["| `hypergradient=` | error | direction | time | memory |", "|---|---|---|---|---|"]
    for algorithm, option in OPTIONS.items():
        rows = [(measured[task].get(algorithm), base[task]) for task in TASKS]
        cells = [
            [_short(row["error"]) if row else "-" for row, _ in rows],
            [f"{row['cosine']:.2f}" if row else "-" for row, _ in rows],
            [f"{row['ms'] / other['ms']:.1f}" if row else "-" for row, other in rows],
            [f"{row['bytes'] / other['bytes']:.1f}" if row else "-" for row, other in rows],
        ]
        lines.append(f"| {option} | " + " | ".join(" / ".join(cell) for cell in cells) + " |")
    return "\n".join(lines)


def page() -> str:
    """Return the page with its table as measured."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def _rows(task: str) -> dict[str, dict[str, Any]]:
    path = ROOT / "benchmarks" / "results" / f"hypergradients_table_{task}.json"
    found = {}
    for row in json.loads(path.read_text())["rows"]:
        own = row["rivals"].get("mlotool", {})
        if "error" in own and "hypergradient" in own:
            one = own["hypergradient"]
            found[row["algorithm"]] = {
                "error": own["error"],
                "cosine": own["cosine"],
                "ms": one["cpu"]["ms"],
                "bytes": one["peak_bytes"],
            }
    return found


def _short(error: float) -> str:
    return f"{error:.0e}" if error < 0.01 else f"{error:.2g}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
