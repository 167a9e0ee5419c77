"""Evolution strategies: a gradient from values of the upper loss alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mlotool.core.arguments import require
from mlotool.core.replay import RandomState
from mlotool.core.settings import Count, Positive, Rounds, Seed, target
from mlotool.hypergradient.unrolled import simulate, step_gradients
from mlotool.hypergradient.vector import add, leaves, moved_to, unflatten, zeros
from mlotool.problem.interface import AbstractStepwise, AbstractZerothOrder, LowerView, Memory, Particle, Vector
from mlotool.problem.optimizers.rule import State
from mlotool.problem.trajectory import on_device

# The parameters and optimizer state that a rollout came to.
End = tuple[tuple[Tensor, ...], tuple[State, ...]]


@target("hypergradient")
@dataclass(frozen=True)
class EvolutionStrategies(AbstractZerothOrder, AbstractStepwise):
    """Evolution strategies: the upper gradient estimated from values of the upper loss at random perturbations.

        g = 1 / (2 sigma num_pairs) sum_i (C(x + sigma e_i) - C(x - sigma e_i)) E_i,   e_i ~ N(0, I)
        E_i = e_i;   with `persistent` (PES), E_i <- E_i + e_i

    This is the gradient of the upper loss smoothed by a Gaussian. x are the upper parameters, and C(x) is the whole
    upper loss, with the direct effect of x and that through the lower problem. For each x + sigma e, the lower steps
    since the upper problem's last step are taken again (a rollout), with their batches, random numbers, learning rates
    and optimizer states. Nothing is differentiated with respect to x. So the upper loss may be an error rate, a count
    or rounded, and the lower loss may depend on x in any way (`stop_gradient` in it has no effect). If the lower
    problem itself reads solutions, these are rolled out first, and all its steps use them as they are at the end of
    their rollouts.

    The error of the estimate is about `norm(gradient) sqrt(number of upper parameters / num_pairs)`, so use this for
    few upper parameters. If the upper problem has `tasks`, each task has its own directions, ranks and weights, and a
    rollout that diverges in one task is left out for that task only. Otherwise the upper loss is a mean over the tasks
    below, whose rollouts run at the same time.

    As in truncated unrolling, effects of x on steps before the last `unroll_steps` are not seen. With `persistent` they
    are: each rollout then continues from where it ended before, under a new perturbation. With E as the sum of its
    perturbations, the estimate is of the gradient through all steps since the rollouts began, without the bias of
    truncation (the bias due to sigma remains, and x changes in between). The variance grows with the number of steps;
    `restart_every` lets the rollouts begin again at the problem's current parameters. A pair of rollouts that diverges
    begins again by itself. Each gradient, also that of `Program.gradient`, moves persistent rollouts.

    Args:
        num_pairs: number of pairs of rollouts.
        sigma: standard deviation of the perturbation; for a loss with jumps, large enough that it differs between both
            signs.
        directions: "gaussian", or "orthogonal": orthogonal e_i of norm sqrt(number of upper parameters). As many
            orthogonal directions as there are parameters give the gradient of a linear function exactly.
        shaping: "none", or "rank": each loss is replaced by its rank, from -0.5 to 0.5 (equal losses get their mean
            rank). The estimate then does not depend on the scale of the loss, nor on the size of outliers.
        persistent: whether rollouts continue from where they ended before.
        restart_every: for persistent rollouts, the number of gradients after which all begin again; None: never.
        seed: seed of the directions, which have their own generator; equal on all ranks.

    Raises:
        ConfigError: a setting is out of range.

    Cost: 2 num_pairs rollouts, one after the other; memory of the directions (num_pairs times the upper parameters) and
    of the records of `unroll_steps` steps; with `persistent` also of 2 num_pairs copies of the lower parameters and
    optimizer states.

    Source: Salimans et al. 2017 (arXiv 1703.03864), section 2; Vicol et al. 2021 (arXiv 2112.13835), algorithm 2.

    Example:
        >>> from mlotool import EvolutionStrategies
        >>> EvolutionStrategies(num_pairs=8, sigma=0.1).directions
        'gaussian'
    """

    num_pairs: Rounds = 8
    sigma: Positive = 0.1
    directions: Literal["gaussian", "orthogonal"] = "gaussian"
    shaping: Literal["none", "rank"] = "none"
    persistent: bool = False
    restart_every: Count | None = None
    seed: Seed = 0
    needs_full_precision = True

    def __post_init__(self) -> None:
        is_right = self.restart_every is None or self.persistent
        require(is_right, "hypergradient.restart_every", self.restart_every, "null without persistent: true")

    @property
    def is_persistent(self) -> bool:  # type: ignore[override]
        """Whether rollouts continue from where they ended before."""
        return self.persistent

    def pullback(self, view: LowerView, inputs: Vector) -> None:
        """Return None: no gradient passes through the solution, as the upper gradient is estimated as a whole."""
        return

    def rollout(self, view: LowerView, inputs: Vector) -> tuple[Tensor, ...]:
        """Return the parameters after the recorded steps, taken again with these inputs."""
        particle, memory = view.particle, view.problem.memory
        if particle is None:
            return self._roll_out(view, inputs, None)[0]
        key = f"{view.problem.name}/{view.problem.reader}/{particle.number}"
        begin = None if particle.is_new else memory.value["ends"].get(key)
        if begin is not None:
            begin = tuple(moved_to(begin[0], view.theta)), on_device(begin[1], view.theta[0].device)
        end = self._roll_out(view, inputs, begin)
        memory.value = {**memory.value, "ends": {**memory.value["ends"], key: end}}
        return end[0]

    def _roll_out(self, view: LowerView, inputs: Vector, begin: End | None) -> End:
        unroll = view.unroll
        assert unroll is not None
        if not unroll.records:
            return simulate(unroll, inputs, view, begin)[1:]
        theta: Vector = unroll.records[0].theta
        state: Sequence[State] = unroll.records[0].state
        if begin is not None:
            theta, state = begin
        elif unroll.start is not None and unroll.has_all:
            theta = unroll.start(inputs)
        for record in unroll.records:
            # A recorded snapshot would hide what the inputs do to the solutions that this problem reads.
            present = replace(record, lower_snapshots={})
            gradient = step_gradients(unroll, present, leaves(theta), inputs, view, create_graph=False)
            with torch.no_grad():
                theta, state = unroll.step(theta, gradient, state, record.hyperparameters, inputs)
        return tuple(theta), tuple(state)

    def gradient(
        self,
        loss: Callable[[Vector, Particle | None], Tensor],
        theta: Vector,
        memory: Memory,
        *,
        devices: tuple[torch.device, ...] = (),
        num_tasks: int | None = None,
        reader: str = "",
    ) -> list[Tensor]:
        """Return the estimate of the gradient at `theta`; all evaluations draw the same random numbers."""
        generator = torch.Generator()
        generator.set_state(memory.value["generator"])
        directions = self._draw(theta, num_tasks, generator)
        random = RandomState(devices)
        # The sum of the directions of each pair since it began, by number of the pair.
        history = memory.value["histories"].get(reader, {"sums": {}, "num_rounds": 0})
        sums, values = history["sums"], []
        with random.replayed():
            for number, direction in enumerate(directions):
                for side, sign in enumerate((1.0, -1.0)):
                    random.restore()
                    particle = Particle(2 * number + side, number not in sums) if self.persistent else None
                    values.append(loss(add(theta, direction, sign * self.sigma), particle).detach())
        # The rollouts have put their ends there meanwhile.
        state = {**memory.value, "generator": generator.get_state()}
        if self.persistent:
            directions = [
                add(moved_to(sums[number], direction), direction) if number in sums else direction
                for number, direction in enumerate(directions)
            ]
            count = history["num_rounds"] + 1
            restarts = self.restart_every is not None and count % self.restart_every == 0
            is_finite = torch.stack(values).reshape(self.num_pairs, -1).isfinite().all(1) & (not restarts)
            # Pairs that are not finite begin again.
            kept = {number: directions[number] for number in is_finite.nonzero().flatten().tolist()}
            state["histories"] = {**state["histories"], reader: {"sums": kept, "num_rounds": count}}
        weights, state["last"] = self._weights(torch.stack(values).reshape(self.num_pairs, 2, -1).double())
        memory.value = state
        if num_tasks is None:
            weights = weights[:, 0]
        total = zeros(theta)
        for direction, weight in zip(directions, weights, strict=True):
            total = add(total, direction, weight)
        return total

    def initial_state(self) -> dict[str, Any]:
        """Return the initial state: the generator's, the statistics, and where persistent rollouts continue."""
        generator = torch.Generator().manual_seed(self.seed).get_state()
        return {"generator": generator, "last": {}, "histories": {}, "ends": {}}

    def statistics(self, state: Mapping[str, Any]) -> dict[str, float]:
        """Return the root mean square of C(x + sigma e) - C(x - sigma e), and the number of non-finite pairs."""
        return {name: float(value) for name, value in state["last"].items()}

    def state_dict(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state, which is plain."""
        return {**state, "last": self.statistics(state)}

    def load_state(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the state that was saved.

        Raises:
            ConfigError: an earlier version saved persistent rollouts, which it kept as lists.
        """
        is_right, fault = isinstance(saved.get("ends", {}), Mapping), "particles of an older version"
        require(is_right, "state of EvolutionStrategies", fault, "particles by number", "Begin the run anew.")
        return {**self.initial_state(), **saved, "generator": saved["generator"].cpu()}

    def _draw(self, theta: Vector, num_tasks: int | None, generator: torch.Generator) -> list[list[Tensor]]:
        """Return directions on the parameters' devices; the numbers are drawn on the CPU, so they are the same."""
        count = num_tasks or 1
        size = sum(tensor.numel() for tensor in theta) // count
        drawn = torch.stack([self._rows(size, generator) for _ in range(count)], 1)
        return [moved_to(unflatten(rows, theta, num_tasks), theta) for rows in drawn]

    def _rows(self, size: int, generator: torch.Generator) -> Tensor:
        if self.directions == "gaussian":
            return torch.randn(self.num_pairs, size, generator=generator, dtype=torch.float64)
        counts = [min(size, self.num_pairs - start) for start in range(0, self.num_pairs, size)]
        return torch.cat([_orthogonal(size, count, generator) for count in counts])

    def _weights(self, values: Tensor) -> tuple[Tensor, dict[str, float | Tensor]]:
        """Return the weights of the directions, [num_pairs, tasks], from the losses, [num_pairs, 2, tasks].

        And what is reported of the losses.
        """
        is_finite = values.isfinite().all(1)
        differences = torch.where(is_finite, values[:, 0] - values[:, 1], 0.0)
        last: dict[str, float | Tensor] = {
            "evolution_difference": differences.square().mean().sqrt(),
            "evolution_failed_pairs": (~is_finite).sum(),
        }
        is_known = is_finite.any(0)
        if self.shaping == "rank":
            from scipy.stats import rankdata  # takes half a second to import

            is_known = values.isfinite().flatten(0, 1).any(0)
            # A rollout that diverged is the worst, not a failure.
            finite = torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf).flatten(0, 1)
            # From -0.5 to 0.5, the mean rank where values are equal.
            ranks = torch.from_numpy(rankdata(finite.cpu(), axis=0)).to(values).reshape(values.shape)
            differences = (ranks[:, 0] - ranks[:, 1]) / (2 * self.num_pairs - 1)
        # Without a number to go by there is no estimate: zero would look like one.
        return torch.where(is_known, differences, torch.nan) / (2 * self.sigma * self.num_pairs), last


def _orthogonal(size: int, count: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(size, count, generator=generator, dtype=torch.float64)
    basis, triangle = torch.linalg.qr(normal)
    # LAPACK chooses signs by the first row; with these the mean is zero, as sums of several rounds need it.
    rows: Tensor = (basis * triangle.diagonal().sign()).T * size**0.5
    return rows
