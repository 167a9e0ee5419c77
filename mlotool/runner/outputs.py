"""What upper problems give the problems below them, looked at now and then: numbers, histograms, and a collapse."""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlotool.config.schema import is_plain_name
from mlotool.core.user_code import is_ours
from mlotool.distributed.collectives import Ranks
from mlotool.folders.run_folder import RunFolder
from mlotool.program import Program
from mlotool.program.guard import PythonState
from mlotool.program.outputs import Output, can_watch, shaping_roles, watched_outputs
from mlotool.runner.values import MAX_VALUES, is_listed

Array = NDArray[np.float64]
# Values, and the losses of their samples.
Seen = tuple[Array, Array | None]

# Of a histogram; histograms of an output over a run; samples whose value and loss are kept; values that are looked at.
NUM_BINS, MAX_ROWS, MAX_SAMPLES, MAX_LOOKED_AT = 32, 200, 1_000, 100_000
# The part of a range in which values count as the same, and the share of them that has to lie there.
WIDTH, SHARE = 0.01, 0.99
# Looks in a row that show a collapse before a run warns of it, while it trains and when it has ended.
LOOKS_IN_A_ROW, LOOKS_AT_THE_END = 20, 3

_NOT_SEEN = (
    "problems.{lower}.loss: cannot be evaluated a second time for logging ({reason}); expected a pure function. The "
    "run continues, but does not log the outputs of {uppers}."
)
_EQUAL = (
    "problems.{upper}: found all values that '{upper}' gave the samples within 1% of each other ({low:.4g} to "
    "{high:.4g}) in the last {count} checks; expected different values after {steps:,} steps. The problem below does "
    "not distinguish its samples, so these values cannot be the reason for any gain over other settings."
)
_LOW = (
    "problems.{upper}: found 99% of the values that '{upper}' gave the samples at the lower end of {range} ({low:.4g} "
    "to {high:.4g}) in the last {count} checks; expected only some of them, after {steps:,} steps. The problem below "
    "hardly learns from its samples, or from very few of them."
)
_ADVICE = (
    " Compare with a control run, baseline=fixed; try another optimizer.lr of '{upper}', or more warmup_steps of the "
    "problem below."
)


class OutputLog:
    """Looks at what the modules of upper problems return inside the losses below, and keeps what the page draws.

    A look evaluates each of these losses once more, on the last batch. It changes nothing in the training. Left out
    are losses with a part in shards, in tasks or that is layer-parallel.

    Args:
        program: the problems.
        ranks: those of the run, which all look after the same ticks.
    """

    def __init__(self, program: Program, ranks: Ranks | None = None) -> None:
        self._program, self._ranks = program, ranks or Ranks()
        problems = program.problems
        self._lowers = [name for name in problems if shaping_roles(program, name) and can_watch(program, name)]
        self._histories: dict[tuple[str, str], History] = {}
        # Their values are in metrics.csv as they are.
        self._listed = {name for name, problem in problems.items() if is_listed(problem)}
        code = [part for problem in problems.values() for part in (problem.loss, *problem.submodules)]
        self._is_foreign = not is_ours(*code)

    def look(self, tick: int) -> dict[str, float]:
        """Return `<upper>/<output>_mean`, `_std`, `_min` and `_max` of each output, and remember the look.

        Args:
            tick: the number of ticks done.
        """
        found: dict[tuple[str, str], list[Seen]] = {}
        for key, seen in self._outputs():
            found.setdefault(key, []).append(seen)
        logged: dict[str, float] = {}
        for (upper, name), parts in found.items():
            values = np.concatenate([values for values, _ in parts])
            losses = [losses for _, losses in parts if losses is not None]
            history = self._histories.setdefault((upper, name), History())
            are_each = len(losses) == len(parts)
            num_steps = self._program.problems[upper].num_steps
            history.add(tick, values, np.concatenate(losses) if are_each else None, num_steps)
            if history.in_a_row == LOOKS_IN_A_ROW:
                self._warn(upper, history)
            # An infinite output, such as that of a mask, has no standard deviation.
            with np.errstate(invalid="ignore"):
                facts = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
            logged |= {f"{upper}/{name}_{fact}": float(value) for fact, value in facts.items()}
        return logged

    def findings(self) -> list[str]:
        """Return a sentence for each output that has collapsed by now."""
        return [
            self._text(upper, history)
            for (upper, _), history in self._histories.items()
            if history.in_a_row >= LOOKS_AT_THE_END
        ]

    def warn_at_the_end(self) -> None:
        """Warn of what has collapsed by now, unless that was done."""
        for (upper, _), history in self._histories.items():
            if history.in_a_row >= LOOKS_AT_THE_END:
                self._warn(upper, history)

    def write(self, folder: RunFolder) -> None:
        """Write `artifacts/outputs_<upper>.<output>.npz` for each output."""
        for (upper, name), history in self._histories.items():
            folder.write_arrays(f"outputs_{upper}.{name}", history.arrays())

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, in plain containers."""
        return {f"{upper}/{name}": history.state_dict() for (upper, name), history in self._histories.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        self._histories = {}
        for key, kept in state.items():
            upper, _, name = key.partition("/")
            self._histories[upper, name] = History()
            self._histories[upper, name].load_state_dict(kept)

    def _outputs(self) -> list[tuple[tuple[str, str], Seen]]:
        """Return what all ranks see, by upper problem and name."""
        if not self._lowers:
            return []
        outputs: list[Output] = []
        for name in [*self._lowers]:
            # One that has not stepped has no last batch.
            if self._program.problems[name].num_steps > 0:
                outputs += self._seen(name)
        kept = [
            ((x.problem, x.name), (_as_array(x.values), None if x.losses is None else _as_array(x.losses)))
            for x in outputs
            if is_plain_name(x.name) and not (x.problem in self._listed and x.values.numel() <= MAX_VALUES)
        ]
        return [seen for of_rank in self._ranks.gather(kept) for seen in of_rank]

    def _seen(self, name: str) -> list[Output]:
        # What code of a user's keeps in Python is as it was before.
        python = PythonState([*self._program.problems.values()]) if self._is_foreign else None
        try:
            return watched_outputs(self._program, name)
        # Of a user's code it may be any error.
        except Exception as error:
            self._lowers.remove(name)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
            uppers = ", ".join(f"'{upper}'" for upper in shaping_roles(self._program, name))
            with warnings.catch_warnings() if not self._ranks.is_first else nullcontext():
                warnings.simplefilter("always")
                warnings.warn(_NOT_SEEN.format(lower=name, reason=reason, uppers=uppers), stacklevel=2)
            return []
        finally:
            if python is not None:
                python.restore()

    def _warn(self, upper: str, history: "History") -> None:
        if not history.has_warned and self._ranks.is_first:
            warnings.warn(self._text(upper, history), stacklevel=2)
        history.has_warned = True

    def _text(self, upper: str, history: "History") -> str:
        text = _EQUAL if history.kind == "equal" else _LOW
        where = "a batch's own range" if history.kind == "few" else "the range that they had in this run"
        low, high = history.last_range
        fields = {"low": low, "high": high, "count": history.in_a_row, "steps": history.num_steps, "range": where}
        return (text + _ADVICE).format(upper=upper, **fields)


class History:
    """What was seen of one output.

    Attributes:
        kind: how its values had collapsed at the last look: "equal", "low" (of their range in the run), "few" (the same
            of a batch's own range); "" where they had not.
        in_a_row: looks at which they have so without a break.
        num_steps: of the upper problem at the last look.
        has_warned: whether the run has told it.
        last_range: smallest and largest value of the last look.
    """

    def __init__(self) -> None:
        self.kind, self.in_a_row, self.num_steps, self.has_warned = "", 0, 0, False
        self.last_range = self._range = (float("nan"), float("nan"))
        # A row is a tick, the ends of the bins, and what they hold; every so many looks have one.
        self._rows, self._every, self._num_looks = np.zeros((0, 3 + NUM_BINS)), 1, 0
        # Values and losses of the last samples.
        self._samples = np.zeros((2, 0))

    def add(self, tick: int, values: Array, losses: Array | None, num_steps: int) -> None:
        """Take what was seen at a look.

        Args:
            tick: of the look.
            values: 1-D.
            losses: of their samples; None where there is not one value per sample.
            num_steps: of the upper problem.
        """
        is_finite = np.isfinite(values if losses is None else values + losses)
        values, losses = values[is_finite], None if losses is None else losses[is_finite]
        if not len(values):
            return
        low, high = self.last_range = float(values.min()), float(values.max())
        if self._num_looks % self._every == 0:
            # Of equal values the first bin holds all.
            counts, _ = np.histogram(values, NUM_BINS, (low, high if high > low else low + 1))
            self._rows = np.concatenate([self._rows, [[tick, low, high, *counts]]])
            if len(self._rows) > MAX_ROWS:
                self._rows, self._every = self._rows[::2], 2 * self._every
        self._num_looks += 1
        # At the first look they are NaN, which `min` and `max` leave out.
        self._range = min(low, self._range[0]), max(high, self._range[1])
        if losses is None:
            return
        self._samples = np.concatenate([self._samples, [values, losses]], axis=1)[:, -MAX_SAMPLES:]
        kind = _collapse(values, losses, *self._range) if num_steps else ""
        self.in_a_row = self.in_a_row + 1 if kind and kind == self.kind else int(bool(kind))
        self.kind, self.num_steps = kind, num_steps

    def arrays(self) -> dict[str, Array]:
        """Return what the page draws: `tick`, `low`, `high` [n], `count` [n, bins], `value` and `loss` [m]."""
        tick, low, high = self._rows[:, :3].T
        return {
            "tick": tick,
            "low": low,
            "high": high,
            "count": self._rows[:, 3:],
            "value": self._samples[0],
            "loss": self._samples[1],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, in plain containers."""
        return {
            **{name: getattr(self, name) for name in _PLAIN},
            "range": [*self._range],
            "last_range": [*self.last_range],
            **{name: torch.from_numpy(getattr(self, name).copy()) for name in _ARRAYS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        for name in _PLAIN:
            setattr(self, name, state[name])
        for name in _ARRAYS:
            setattr(self, name, state[name].numpy())
        (low, high), (smallest, largest) = state["range"], state["last_range"]
        self._range, self.last_range = (low, high), (smallest, largest)


_PLAIN, _ARRAYS = ("kind", "in_a_row", "num_steps", "has_warned", "_every", "_num_looks"), ("_rows", "_samples")


def _collapse(values: Array, losses: Array, low: float, high: float) -> str:
    """Return how values of samples have collapsed, as `History.kind` has it; "" where they have not.

    Args:
        values: 1-D.
        losses: of the samples.
        low: the smallest value of the run so far.
        high: the largest one.
    """
    smallest, largest = float(values.min()), float(values.max())
    if largest - smallest <= WIDTH * max(abs(smallest), abs(largest)):
        return "equal"
    # By Euler's theorem: of a loss that only sees their ratios, sum_i w_i dC/dw_i = 0.
    products = values * losses
    has_scale = bool(abs(products.sum()) > 1e-3 * np.abs(products).sum())
    if not has_scale:
        low, high = smallest, largest
    is_low = values <= low + WIDTH * (high - low)
    return ("low" if has_scale else "few") if is_low.mean() >= SHARE else ""


def _as_array(values: Tensor) -> Array:
    """Return values on the CPU, at most `MAX_LOOKED_AT` of them."""
    array: Array = values[:: -(-len(values) // MAX_LOOKED_AT)].double().cpu().numpy()
    return array
