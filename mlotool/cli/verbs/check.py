"""Compare a recipe's hypergradient with the most exact one, with every option, and with finite differences.

The recipe is built, and trained for some ticks. At the parameters and batches that it has then, its hypergradient is
compared with the most exact one that fits into memory, with every option of conf/hypergradient, and with finite
differences of the solved program. All is computed in float64 on the CPU. No run folder is written, nothing is logged.

  mlotool check mwn
  mlotool check mwn --ticks 500 hypergradient=cg
"""

from typing import TYPE_CHECKING

from mlotool import config
from mlotool.cli.arguments import compose_request, recipe_parser
from mlotool.cli.terminal import plain_console, print_table, warn
from mlotool.core.messages import escape

if TYPE_CHECKING:
    from mlotool.hypergradient.compare import Response, Slope
    from mlotool.runner.checking import Check


def main(words: list[str]) -> int:
    """Print a table for each problem that shapes others."""
    parser = recipe_parser("check", __doc__)
    parser.add_argument("--ticks", type=int, default=0, help="ticks of training before the comparison; 0 by default")
    arguments = parser.parse(words)
    if arguments.ticks < 0:
        parser.error(f"--ticks: found {arguments.ticks}; expected a whole number of at least 0")
    request, composed = compose_request(arguments.words, "check", arguments.trust)
    warn(*config.check(composed, targets=True))
    from mlotool.runner.checking import check_hypergradients

    for comparison in check_hypergradients(composed, ticks=arguments.ticks):
        show_check(comparison, request.recipe or composed.name)
    return 0


# From here on two hypergradients make the same run, up to the step size.
GOOD_COSINE = 0.99


def show_check(check: "Check", recipe: str) -> None:
    """Print a table and what to do for an upper problem."""
    console = plain_console()
    console.print(
        f"\n{escape(recipe)}: hypergradient of '{check.upper}' ({check.num_parameters} parameters), tick {check.ticks}"
    )
    for name, algorithm in check.lowers.items():
        console.print(f"  through '{name}': {algorithm}")
    console.print(f"  most exact: {check.reference}")
    rows = [_cells(response) for response in check.responses]
    heads = ("hypergradient=", "norm", "cosine", "relative error", "ms", "note")
    print_table(console, [(head, cells, head != "note") for head, *cells in zip(heads, *rows, strict=True)])
    console.print("\n".join(_slope_lines(check.slope)))
    console.print(advice(check.responses))


def advice(responses: "tuple[Response, ...]") -> str:
    """Return what a person could do about the recipe's own response."""
    exact, chosen, *others = responses
    if not exact.norm or chosen.norm is None or chosen.cosine is None:
        return "advice: a hypergradient is zero or not finite here; see its note, and check the problem above."
    if not exact.has_converged:
        return (
            "advice: no solve converges here, so the first row is no true reference. Train longer (--ticks), give the "
            "lower problem weight decay, or differentiate its steps (hypergradient=unrolled)."
        )
    if chosen.cosine >= GOOD_COSINE:
        length = f"its length is {chosen.norm / exact.norm:.2g} of the exact one's"
        return f"advice: none; the direction is right (cosine {chosen.cosine:.4f}), and {length}."
    # The cheapest of those that are right; else the one that is nearest.
    right = [other for other in others if (other.cosine or -1.0) >= GOOD_COSINE]
    nearest = sorted(others, key=lambda other: other.cosine or -1.0)[-1:]
    best = min(right or nearest, key=lambda other: other.seconds or 0.0, default=chosen)
    if (best.cosine or -1.0) <= chosen.cosine + 0.01:
        return (
            f"advice: cosine {chosen.cosine:.2f} to the most exact one, and no option does better here; raise the "
            "solver's iterations, or train the lower problem closer to its solution (unroll_steps)."
        )
    times = (best.seconds or 0.0) / (chosen.seconds or 1.0)
    best_text = f"hypergradient={best.name} has {best.cosine:.2f} at {times:.1f} times the time"
    return f"advice: cosine {chosen.cosine:.2f}; {best_text}."


def _cells(response: "Response") -> list[str]:
    numbers = (response.norm, response.cosine, response.error)
    cells = ["" if value is None else f"{value:.4g}" for value in numbers]
    time = "" if response.seconds is None else f"{1e3 * response.seconds:.1f}"
    return [response.name, *cells, time, response.note]


def _slope_lines(slope: "Slope") -> list[str]:
    head = "slope of the upper loss along the most exact hypergradient, each lower problem solved (or unrolled) anew:"
    if slope.difference is None or slope.exact is None or slope.own is None:
        return [head, f"  not measured: {slope.note}"]
    how = "" if slope.stationarity is None else f"(lower gradients down to {slope.stationarity:.1e} of before)"
    lines = [head, f"  finite differences {slope.difference:.6g} {how}"]
    for name, value in (("most exact", slope.exact), ("this recipe's", slope.own)):
        error = f"  (off by {abs(value / slope.difference - 1):.1e})" if slope.difference else ""
        lines.append(f"  {name:<18} {value:.6g}{error}")
    return lines
