"""What upper problems give the problems below them, looked at now and then: numbers, histograms, and a collapse."""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from mlotool.config.schema import is_plain_name
from mlotool.core.user_code import is_ours
from mlotool.distributed.collectives import Ranks
from mlotool.folders.run_folder import RunFolder
from mlotool.program import Program
from mlotool.program.guard import PythonState
from mlotool.program.outputs import Output, can_watch, shaping_roles, watched_outputs
from mlotool.runner.evaluation import traceless
from mlotool.runner.values import MAX_VALUES, is_listed

# Of a histogram; histograms of an output over a run; samples whose value and loss are kept; values that are looked at.
NUM_BINS, MAX_ROWS, MAX_SAMPLES, MAX_LOOKED_AT = 32, 200, 1_000, 100_000
# The part of a range in which values count as the same, and the share of them that has to lie there.
WIDTH, SHARE = 0.01, 0.99
# Looks in a row that show a collapse before a run warns of it, while it trains and when it has ended.
LOOKS_IN_A_ROW, LOOKS_AT_THE_END = 20, 3

_NOT_SEEN = (
    "problems.{lower}.loss: it could not be evaluated beside its steps ({reason}); expected a pure function. The run "
    "goes on, and does not log what {uppers} give(s) it."
)
_EQUAL = (
    "problems.{upper}: found all values that '{upper}' gave the samples within 1% of each other ({low:.4g} to "
    "{high:.4g}) at the last {count} looks; expected different ones after {steps:,} steps. The problem below does not "
    "distinguish its samples, so a gain over other settings is none of these values."
)
_LOW = (
    "problems.{upper}: found 99% of the values that '{upper}' gave the samples at the lower end of {range} ({low:.4g} "
    "to {high:.4g}) at the last {count} looks; expected a part of them, after {steps:,} steps. The problem below hardly "
    "learns from its samples, or from very few of them."
)
_ADVICE = (
    " Compare with the control, baseline=fixed; try another optimizer.lr of '{upper}', or more warmup_steps of the "
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

    def look(self, tick: int) -> dict[str, float]:
        """Return `<upper>/<output>_mean`, `_std`, `_min` and `_max` of each output, and remember the look.

        Args:
            tick: the number of ticks done.
        """
        found: dict[tuple[str, str], tuple[Tensor, Tensor | None]] = {}
        for output in self._outputs():
            values, losses = found.get((output.problem, output.name), (torch.empty(0), torch.empty(0)))
            both = losses is not None and output.losses is not None
            losses = torch.cat([losses, output.losses]) if both else None  # type: ignore[list-item]
            found[output.problem, output.name] = torch.cat([values, output.values]), losses
        logged: dict[str, float] = {}
        for (upper, name), (values, losses) in found.items():
            history = self._histories.setdefault((upper, name), History())
            history.add(tick, values, losses, self._program.problems[upper].num_steps)
            if history.in_a_row == LOOKS_IN_A_ROW:
                self._warn(upper, history)
            facts = {"mean": values.mean(), "std": values.std(correction=0), "min": values.min(), "max": values.max()}
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
        """Write `artifacts/outputs_<upper>_<output>.npz` for each output."""
        for (upper, name), history in self._histories.items():
            folder.write_arrays(f"outputs_{upper}_{name}", {key: x.numpy() for key, x in history.arrays().items()})

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

    def _outputs(self) -> list[Output]:
        if not self._lowers:
            return []
        outputs: list[Output] = []
        with traceless(self._program):
            for name in [*self._lowers]:
                # One that has not stepped has no last batch.
                if self._program.problems[name].num_steps > 0:
                    outputs += self._seen(name)
        listed = {name for name, problem in self._program.problems.items() if is_listed(problem)}
        kept = [x for x in outputs if is_plain_name(x.name) and not (x.problem in listed and _is_few(x.values))]
        return [output for of_rank in self._ranks.gather([_small(x) for x in kept]) for output in of_rank]

    def _seen(self, name: str) -> list[Output]:
        problem, problems = self._program.problems[name], list(self._program.problems.values())
        modules = [part for other in problems for part in other.submodules]
        # What code of a user's keeps in Python is as it was before.
        python = None if is_ours(problem.loss, *modules) else PythonState(problems)
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
        self._rows, self._every, self._num_looks = torch.empty(0, 3 + NUM_BINS, dtype=torch.float64), 1, 0
        # Values and losses of the last samples.
        self._samples = torch.empty(2, 0, dtype=torch.float64)

    def add(self, tick: int, values: Tensor, losses: Tensor | None, num_steps: int) -> None:
        """Take what was seen at a look.

        Args:
            tick: of the look.
            values: 1-D.
            losses: of their samples; None where there is not one value a sample.
            num_steps: of the upper problem.
        """
        is_finite = values.isfinite() if losses is None else values.isfinite() & losses.isfinite()
        values, losses = values[is_finite].double(), None if losses is None else losses[is_finite].double()
        if not len(values):
            return
        low, high = self.last_range = float(values.min()), float(values.max())
        if self._num_looks % self._every == 0:
            counts = torch.histc(values, NUM_BINS, low, high) if high > low else _all_in_one(len(values))
            row = torch.cat([torch.tensor([float(tick), low, high], dtype=torch.float64), counts])
            self._rows = torch.cat([self._rows, row[None]])
            if len(self._rows) > MAX_ROWS:
                self._rows, self._every = self._rows[::2].clone(), 2 * self._every
        self._num_looks += 1
        # At the first look they are NaN, which `min` and `max` leave out.
        self._range = min(low, self._range[0]), max(high, self._range[1])
        if losses is None:
            return
        self._samples = torch.cat([self._samples, torch.stack([values, losses])], dim=1)[:, -MAX_SAMPLES:].clone()
        kind = _collapse(values, losses, *self._range) if num_steps else ""
        self.in_a_row = self.in_a_row + 1 if kind and kind == self.kind else int(bool(kind))
        self.kind, self.num_steps = kind, num_steps

    def arrays(self) -> dict[str, Tensor]:
        """Return what the page draws: `tick`, `low`, `high` [n], `count` [n, bins], `value` and `loss` [m]."""
        tick, low, high = self._rows[:, :3].T
        return {
            **{"tick": tick, "low": low, "high": high, "count": self._rows[:, 3:]},
            **{"value": self._samples[0], "loss": self._samples[1]},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, in plain containers."""
        names = ("kind", "in_a_row", "num_steps", "has_warned", "_rows", "_every", "_num_looks", "_samples")
        return {**{name: getattr(self, name) for name in names}, "ranges": [*self._range, *self.last_range]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take it back."""
        for name, value in state.items():
            if name != "ranges":
                setattr(self, name, value)
        low, high, *last = state["ranges"]
        self._range, self.last_range = (low, high), (last[0], last[1])


def _collapse(values: Tensor, losses: Tensor, low: float, high: float) -> str:
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
    has_scale = float(products.sum().abs()) > 1e-3 * float(products.abs().sum())
    if not has_scale:
        low, high = smallest, largest
    is_low = values <= low + WIDTH * (high - low)
    return ("low" if has_scale else "few") if float(is_low.double().mean()) >= SHARE else ""


def _all_in_one(count: int) -> Tensor:
    counts = torch.zeros(NUM_BINS, dtype=torch.float64)
    counts[0] = count
    return counts


def _is_few(values: Tensor) -> bool:
    return values.numel() <= MAX_VALUES


def _small(output: Output) -> Output:
    """Return an output on the CPU, with at most `MAX_LOOKED_AT` values."""
    step = -(-len(output.values) // MAX_LOOKED_AT)
    losses = None if output.losses is None else output.losses[::step].double().cpu()
    return Output(output.problem, output.name, output.values[::step].double().cpu(), losses)
