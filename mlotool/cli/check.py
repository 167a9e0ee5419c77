"""`mlotool check`: a recipe's hypergradients beside the most exact ones, and beside finite differences."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from mlotool.cli.arguments import recipe_parser
from mlotool.cli.job import plain_console
from mlotool.core.errors import ConfigError
from mlotool.core.messages import escape

if TYPE_CHECKING:
    from mlotool.hypergradient.diagnostics.compare import Response, Slope
    from mlotool.runner.checking import Check


DESCRIPTION = """Build a recipe, train it for some ticks, and compare its hypergradient, at the parameters and batches
that it has then, with the most exact one that fits into memory, with every option of conf/hypergradient, and with
finite differences of the solved program. All in float64, on the CPU; the run folder and the loggers are not touched.

  mlotool check mwn
  mlotool check mwn --ticks 500 hypergradient=cg
"""


def main(words: Sequence[str]) -> int:
    """Print a table for each problem that shapes others."""
    parser = recipe_parser("check", DESCRIPTION)
    parser.add_argument("--ticks", type=int, default=0, help="ticks of training before the comparison; 0 by default")
    arguments = parser.parse(words)
    if arguments.ticks < 0:
        raise ConfigError(f"--ticks: found {arguments.ticks}; expected a whole number of at least 0. Correct it.")
    from mlotool import config
    from mlotool.cli.arguments import compose_request

    request, composed = compose_request(arguments.words, "check", arguments.trust)
    for warning in config.check(composed, targets=True):
        print(f"mlotool: warning: {escape(warning)}", file=sys.stderr)
    from mlotool.runner.checking import check_hypergradients

    show_check(check_hypergradients(composed, ticks=arguments.ticks), request.recipe or composed.name)
    return 0


GOOD_ERROR = 0.05
GOOD_COSINE = 0.99
"""From here on two hypergradients make the same run, up to the step size."""


def show_check(checks: "Iterable[Check]", recipe: str) -> None:
    """Print a table and what to do for each upper problem."""
    console = plain_console()
    for check in checks:
        console.print(
            f"\n{escape(recipe)}: "
            f"hypergradient of '{check.upper}' ({check.num_parameters} parameters), tick {check.ticks}"
        )
        for name, algorithm in check.lowers.items():
            console.print(f"  through '{name}': {algorithm}")
        console.print(f"  most exact: {check.reference}")
        table = Table(box=None, pad_edge=False)
        table.add_column("hypergradient=")
        for column in ("norm", "cosine", "relative error", "ms"):
            table.add_column(column, justify="right")
        table.add_column("note", overflow="fold", max_width=80)
        for response in check.responses:
            table.add_row(*_cells(response))
        console.print(table)
        console.print("\n".join(_slope_lines(check.slope)))
        console.print(advice(check.responses))


def advice(responses: "tuple[Response, ...]") -> str:
    """Return what a person could do about the recipe's own response."""
    exact, own, *others = responses
    if not exact.norm or own.norm is None:
        return "advice: the most exact hypergradient is zero or not finite here; look at the problem above first."
    if not exact.has_converged:
        return (
            "advice: no solve converges here, so the lower problem is at no well-conditioned minimum, and the first "
            "row is no reference. Train longer (--ticks), give the lower problem weight decay, or differentiate its "
            "steps (hypergradient=unrolled)."
        )
    if own.cosine is None:
        return "advice: this recipe's hypergradient is zero here; see its note."
    if own.error is not None and own.error <= GOOD_ERROR:
        return f"advice: none; it is right (relative error {own.error:.1e})."
    if own.cosine >= GOOD_COSINE:
        return (
            f"advice: none for the direction, which is right (cosine {own.cosine:.4f}); the length is "
            f"{own.norm / exact.norm:.2g} of the exact one's, which a learning rate makes up for, and Adam by itself."
        )
    better = [each for each in others if each.cosine is not None and each.cosine > own.cosine + 0.01]
    if not better:
        return (
            f"advice: cosine {own.cosine:.2f} to the most exact one, and no option does better here; raise the "
            "solver's iterations, or train the lower problem closer to its solution (unroll_steps)."
        )
    right = [each for each in better if each.cosine is not None and each.cosine >= GOOD_COSINE]
    # The cheapest of those that are right; else the one that is nearest.
    by_time, by_cosine = (lambda each: each.seconds or 0.0), (lambda each: each.cosine or 0.0)
    best = min(right, key=by_time) if right else max(better, key=by_cosine)
    assert best.cosine is not None and best.seconds is not None and own.seconds is not None
    return (
        f"advice: cosine {own.cosine:.2f}; hypergradient={best.name} has {best.cosine:.2f} at "
        f"{best.seconds / own.seconds:.1f} times the time."
    )


def _cells(response: "Response") -> list[str]:
    numbers = (response.norm, response.cosine, response.error)
    cells = ["" if value is None else f"{value:.4g}" for value in numbers]
    time = "" if response.seconds is None else f"{1e3 * response.seconds:.1f}"
    return [response.name, *cells, time, response.note]


def _slope_lines(slope: "Slope") -> Iterable[str]:
    yield "slope of the upper loss along the most exact hypergradient, each lower problem solved (or unrolled) anew:"
    if slope.difference is None or slope.exact is None or slope.own is None:
        yield f"  not measured: {slope.note}"
        return
    how = "" if slope.stationarity is None else f"(lower gradients down to {slope.stationarity:.1e} of before)"
    yield f"  finite differences {slope.difference:.6g} {how}"
    for name, value in (("most exact", slope.exact), ("this recipe's", slope.own)):
        error = f"off by {abs(value / slope.difference - 1):.1e}" if slope.difference else "the difference is zero"
        yield f"  {name:<18} {value:.6g}  ({error})"
