"""Keeping the steps that problems take, for hypergradients that differentiate them."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mlotool.core.forward_mode import explained, twice_differentiable, twice_differentiable_mode
from mlotool.core.gradient import dense
from mlotool.core.loss_output import LossOutput
from mlotool.core.replay import RandomState
from mlotool.problem.problem import Problem
from mlotool.problem.trajectory import Buffers, LowerSnapshot, MovingBuffers, StepGraph, StepRecord, TakenGradient
from mlotool.program.solution_order import SolutionOrder
from mlotool.program.solution_plan import Engine


class StepRecorder:
    """Keeps what the steps of a program's problems were taken from, in their trajectories.

    Args:
        problems: by name.
        order: which solutions depend on which parameters.
        engine: of the program.
    """

    def __init__(self, problems: Mapping[str, Problem], order: SolutionOrder, engine: Engine) -> None:
        self._problems, self._order, self._engine = problems, order, engine
        self._buffers: dict[str, MovingBuffers] = {}
        # By recorded problem: the lower problems whose parameters its steps read, and those whose solutions they read.
        self._read = {name: order.read_by(name) for name, each in problems.items() if each.trajectory.is_kept}

    def state(self, name: str) -> tuple[RandomState, Buffers]:
        """Return what the next evaluation in a recorded step depends on besides parameters and batch."""
        problem = self._problems[name]
        buffers = self._buffers.get(name)
        if buffers is None or buffers.module is not problem.module:
            buffers = self._buffers[name] = MovingBuffers(problem.module)
        return RandomState(problem.devices), buffers.now()

    def record(
        self,
        name: str,
        batches: Sequence[Any],
        states: Sequence[tuple[RandomState, Buffers]],
        graph: StepGraph | None = None,
        gradient: Sequence[Tensor | None] | None = None,
    ) -> None:
        """Keep the step that a problem is about to take, as far as its hypergradient needs it.

        Args:
            name: the problem.
            batches: of the step.
            states: what `state` returned before the evaluation on each of them.
            graph: of its gradient, where that is kept.
            gradient: over batches and ranks, where it is known already; kept where the hypergradient wants it.
        """
        problem = self._problems[name]
        algorithm = problem.hypergradient
        assert algorithm is not None
        store = algorithm.trajectory
        traits = self._engine.traits[self._engine.numbers[name]]
        prefers_forward = problem.has_blocks and not self.makes_solutions(name) and not traits.lacks_tangents
        is_kept = store.keeps(problem.trajectory.num_taken, problem.settings.unroll_steps)
        step = StepRecord(
            tuple(tensor.clone() for tensor in problem.current()) if is_kept else (),
            problem.optimizer_state() if is_kept else (),
            tuple(dict(each) for each in problem.optimizer_step.hyperparameters()),
            tuple((batch, random) for batch, (random, _) in zip(batches, states, strict=True)),
            self._lower_snapshots(name),
            graph,
            tuple(gradient) if gradient is not None and algorithm.saves_gradients(prefers_forward) else None,
            tuple(buffers for _, buffers in states) if any(buffers for _, buffers in states) else (),
            # A gradient through solutions is an approximation, which is another one where it is differentiated.
            None
            if self.makes_solutions(name)
            else TakenGradient.of(gradient, problem.trajectory.num_unrolls, problem.trajectory.largest_norm),
        )
        problem.trajectory.append(step.on(torch.device("cpu"), pinned=True) if store.offload else step)

    def _lower_snapshots(self, name: str) -> dict[str, LowerSnapshot]:
        """Return the problems that a step of `name` reads, each with what its pullback needs if it has one there."""
        held, solved = self._read[name]
        found = {}
        for other in (*held, *solved):
            problem = self._problems[other]
            theta = tuple(tensor.clone() for tensor in problem.current())
            found[other] = LowerSnapshot(theta)
            if other in solved:
                stream = None if problem.stream is None else problem.stream.copy()
                steps = tuple(problem.trajectory)
                if problem.hypergradient is not None and not problem.hypergradient.keeps_graphs:
                    # A budget is for the graphs of one unroll, and this step would hold those of an earlier one.
                    steps = tuple(replace(step, graph=None) for step in steps)
                found[other] = LowerSnapshot(theta, stream, steps, problem.trajectory.has_all)
        return found

    def makes_solutions(self, name: str) -> bool:
        """Return whether solutions are eliminated inside the steps of `name`."""
        return bool(self._read[name][1])

    def leaves(self, name: str) -> dict[int, list[Tensor]]:
        """Return copies of the parameters of `name` and of what shapes it, by number, at which gradients are taken."""
        return {
            self._engine.numbers[other]: [x.clone().requires_grad_() for x in self._problems[other].current()]
            for other in (name, *self._order.inputs(name))
        }

    def kept_gradient(
        self, name: str, batch: Any, leaves: Mapping[int, Sequence[Tensor]]
    ) -> tuple[LossOutput, tuple[Tensor | None, ...]]:
        """Return the loss of a training step and its gradient with a graph, at the tensors of `leaves`.

        Where operators of the loss fail in double backward, it is evaluated with equal ones.

        Args:
            name: the problem, which shapes none that it reads.
            batch: its batch.
            leaves: what `leaves` returned.

        Raises:
            ConfigError: the loss cannot be differentiated twice.
        """
        number, values = self._engine.numbers[name], self._engine.nothing()
        for other, tensors in leaves.items():
            values[other] = tensors
        values[number] = theta = self._engine.rank_mean.shared(leaves[number])
        loss, traits = self._engine.losses[number], self._engine.traits[number]
        if not (traits.is_twice_differentiable or traits.replaces_operators):
            # The search may evaluate twice: not live, since buffers move once a step.
            devices = self._problems[name].devices
            random = RandomState(devices)
            twice_differentiable(name, traits, devices, lambda: loss(values, batch).loss)
            random.restore()
        with twice_differentiable_mode(name) if traits.replaces_operators else nullcontext():
            output = loss(values, batch, live=True)
        with explained(name, "reverse"):
            return output, dense(torch.autograd.grad(output.loss, theta, create_graph=True, allow_unused=True))
