"""Layer-parallel training by auxiliary variables: the stand-in for a problem's module in its own training steps."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.arguments import require
from mlotool.core.errors import ConfigError, RunError
from mlotool.core.loss_output import LossOutput
from mlotool.core.messages import did_you_mean
from mlotool.core.settings import target
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import Identity, Implicit
from mlotool.layerparallel.auxiliary.team import TINY, SpanRecorder, Team, forecast
from mlotool.layerparallel.auxiliary.variables import AuxiliarySettings, Samples, StageStep
from mlotool.layerparallel.exchange import Transport
from mlotool.layerparallel.partition.chain import MEASURED, balanced_cut, bound, chain_for
from mlotool.layerparallel.partition.trace import Inputs, has_layers
from mlotool.problem.parallel import AbstractParallel

# Violation, relative to the states or absolute, at which a run ends.
DIVERGED = 1e3
# The same, relative, at which it warns.
PARTED = 10.0


class _LastStageElsewhere(BaseException):
    """Leaves a loss whose rest belongs to the process of the last stage.

    It passes through the user's loss, which may handle every `Exception`, and never leaves `evaluate`.
    """


@target("parallel")
@dataclass(eq=False, repr=False)
class Auxiliary(AuxiliarySettings, AbstractParallel):
    """Layer-parallel training: K stages of the module run at the same time, each from an auxiliary variable lambda_k.

        min over theta, lambda of
        phi(X^{K-1}) + sum_k c (beta norm(lambda_k - X^{k-1})^2 - <kappa_k, lambda_k - X^{k-1}>)

    X^k is the output of stage k for the input lambda_k (lambda_0 is the module's input). Each stage takes a step along
    its own loss `c (beta norm(lambda_{k+1} - X^k)^2 + <kappa_{k+1}, X^k>)`; for the last stage this is phi, the
    problem's loss. Then

        lambda_k <- lambda_k - eta (c (2 beta (lambda_k - X^{k-1}) - kappa_k) + d(loss of stage k)/d lambda_k)
        kappa_k  <- kappa_k - 2 beta (lambda_k - X^{k-1})

    Evaluation and hypergradients use the serial network. lambda, kappa and the auxiliary networks are part of the
    training state and of every checkpoint, but not of theta.

    Stored variables need the batch's `index`, which identifies its samples; a sample that is seen for the first time
    gets the variables of a serial pass. With random augmentation, choose auxiliary networks, or a finite number of
    `copies` of each sample. In training, BatchNorm normalizes by the statistics for lambda. Its running statistics,
    which evaluation uses, come from the stages too, unless `recalibrate` collects them from serial passes.

    Args:
        stages: K, the number of stages; 1 is backpropagation.
        cut: names of the layers, or groups of layers, with which the stages 1 .. K-1 begin. None balances the numbers
            of operations, equally in each run; `measured` balances the times of the first batch on this machine. The
            first step reports how well the stages are balanced, with a warning if the longest takes 1.3 times the mean.
        method: `penalty` (kappa = 0), or `lagrangian`.
        variables: `stored`: one variable per sample and interface; `auxnet`: lambda_{k+1} = AuxNet_k(lambda_k);
            `recursive`: lambda_k = ReAuxNet_k(X_0). The auxiliary networks learn to predict the corrected variables.
        auxnet: a smaller module with the same inputs (in the paper, a ResNet-20 for a ResNet-110), which is cut where
            its states have the shapes at the stages' cuts; the parts are the auxiliary networks. None uses copies of
            the stages with fewer blocks.
        auxnet_blocks: how many blocks that keep the shape such a copy has.
        auxnet_lr: learning rate of the auxiliary networks: a number, or {start, factor, every, maximum}, as for beta.
            Let it fall together with the problem's own learning rate, so that stages and variables agree at the end.
        auxnet_optimizer: `sgd` or `adam`.
        auxnet_gradient: the gradient for the networks of `auxnet`. `local`, as in the paper: AuxNet_{k-1} learns from
            the loss of stage k at lambda_k. `chain`: it also learns through AuxNet_k, so that derivatives pass back
            from network to network, and stages and networks follow the gradient of one objective (if the rates of all
            interfaces are equal, and `lambda_steps` is 1). `chain` is more accurate with three stages or more, but the
            backward passes of the networks wait for each other, as the forward passes do. With two stages, or with
            `recursive`, both are the same.
        distillation_steps: number of steps of the auxiliary networks per batch.
        beta: the penalty coefficient: a number, or {start, factor, every, maximum}, which is multiplied by `factor`
            every `every` steps; or a list of K-1 of these, one for each interface. A larger beta couples the stages
            more tightly and makes their losses steeper, so lower the learning rate with it.
        reduction: c is 1 over the number of elements (`mean`), or 1 (`sum`).
        lambda_rate: eta as a multiple of 1 / (2 c beta), the step to the stationary lambda (eq. 17) for the current
            slope; or a list of K-1 of these, one for each interface. `auto` is 1 / (1 + curvature): the curvature of
            the stage's loss relative to that of the penalty, estimated every 20 steps; for a stage that ends with a
            penalty, it is the largest eigenvalue of J^T J, with the stage's Jacobian J. None is 1; or 0.5 for stored
            variables whose stage ends with a penalty too, where whole steps overshoot.
        lambda_steps: number of steps of lambda per batch; each step after the first takes one more pass of the stage.
        lambda_lr: eta itself, instead of `lambda_rate`.
        multiplier_rule: the step size of kappa. `exact`: 2 beta; `paper`: eta / (2 beta), as printed in the paper,
            which is the inverse.
        noise: standard deviation of Gaussian noise on lambda.
        copies: for stored variables, the number of augmented copies of each sample. Set `data.augment` to the same
            number; the batch then has `copy` beside `index`.
        recalibrate: number of steps between two serial passes that collect BatchNorm's running statistics; 0: they come
            from the stages' passes.
        table_device: the device of the stored variables; None: that of the module.
        processes: whether each stage runs in its own process, with rank = part * stages + stage. If there are several
            ranks per stage, they share the batch. A single process runs all stages, and warns.
        streams: in one process on a GPU, whether each stage has its own CUDA stream.
        record: number of batches whose times are recorded.

    Raises:
        ConfigError: a setting is out of range, or settings do not go together.

    Cost: with one process per stage, a step takes the time of the forward and backward pass of one stage and of one
    auxiliary network. Stored variables take the memory of one state per sample and interface, and multipliers as much
    again.

    Source: Sun et al. 2021, Layer-Parallel Training of Residual Networks with Auxiliary-Variable Networks
    (arXiv 2112.05387).

    Example:
        >>> from functools import partial
        >>> from mlotool import Problem
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> problem = Problem("net", net, lambda batch, *, model: model(batch["input"]).square().mean(),
        ...                   roles={"model": "net"}, optimizer=partial(torch.optim.SGD, lr=0.1),
        ...                   parallel=Auxiliary(stages=2))
        >>> problem.parallel.stages
        2
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.transport = Transport()
        self._recorder = SpanRecorder(self.record)
        self._team: Team | None = None
        self._seed: int | None = None
        self._num_steps = 0
        self._pending: Mapping[str, Any] | None = None
        self._samples = Samples(self.copies)
        # Of the step at hand: its samples, its weight, what its call and its loss were, and another start of the end.
        self._slots: Tensor | None = None
        self._share, self._is_open = 1.0, False
        self._step: StageStep | None = None
        self._loss: Callable[[], LossOutput] | None = None
        self._point: Tensor | None = None
        self._metrics: list[str] | None = None
        self._is_moved = self._is_optimizer_moved = self._has_warned = False

    def attach(self, name: str, module: nn.Module) -> None:
        """Take the module, which is cut at the first step; names of layers that it has not are told at once."""
        self.key, self._module = f"problems.{name}.parallel", module
        paths = dict(module.named_modules())
        for layer in () if self.cut is None or isinstance(self.cut, str) else self.cut:
            # One of equal layers is no module.
            is_known = layer in paths or has_layers(paths.get(layer.rpartition(".")[0], module))
            advice = f"{did_you_mean(layer, paths)} Correct the name, or set cut to null.".strip()
            require(is_known, f"{self.key}.cut", layer, "the name of a layer of the module", advice)

    def seed(self, seed: int) -> None:
        """Take the seed of the program, the same in all processes; drawing one would change what the run draws."""
        if self._seed is None:
            self._seed = seed % 2**62

    def check_data(self, dataset: Any) -> None:
        """Refuse stored variables of samples that come in another form each time."""
        is_finite = hasattr(getattr(dataset, "augmentation", None), "num_copies")
        is_new = getattr(dataset, "seeded", False) and not is_finite
        expected = "auxiliary networks for data with random augmentation"
        advice = f"Set {self.key}.variables=auxnet, or data.augment and {self.key}.copies to a number of copies."
        is_right = not (is_new and self.is_stored and self.stages > 1)
        require(is_right, f"{self.key}.variables", self.variables, expected, advice)

    def to(self, device: torch.device) -> None:
        """Move the networks and tables of auxiliary variables to a device."""
        if self.auxnet is not None:
            self.auxnet.to(device)
        if self._team is not None:
            self._team.to(device)

    @property
    def is_repeatable(self) -> bool:
        """Whether a gradient may be taken several times: with one stage only, since each moves auxiliary variables."""
        return self.stages == 1

    @property
    def is_divided(self) -> bool:
        """Whether each stage is in a process of its own."""
        return self.transport.is_divided

    def distribute(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Take a stage (with `processes`), or all of them, for a part of the batch."""
        if self.processes and num_ranks == 1:
            fault = f"{self.key}.processes: found true on one rank, which runs all stages one after the other"
            warnings.warn(f"{fault}. Set runner.devices={self.stages}, or leave processes out.", stacklevel=2)
        if self.processes and num_ranks > 1:
            self.transport = Transport.join(rank, num_ranks, self.stages, self.key)
        else:
            self.transport = Transport(replicas=Ranks(rank, num_ranks))
        return self.transport.replicas.rank, self.transport.replicas.size

    def before_step(self) -> None:
        """Note that this stage's parameters are about to move: the other processes have old ones until `sync`."""
        self._is_moved = self._is_optimizer_moved = True

    def sync(self, optimizer: Optimizer | None) -> None:
        """Give each process the parameters, buffers and optimizer state of the stages that other processes move."""
        if self._team is None or not self.is_divided:
            return
        if self._is_moved:
            self._team.sync()
            self._is_moved = False
        if self._is_optimizer_moved and optimizer is not None:
            self._team.sync_optimizer(optimizer)
            self._is_optimizer_moved = False

    def agree_on_buffers(self) -> None:
        """Average the buffers of each stage over the parts of the batch, and give them to all processes."""
        if self._team is not None and self.is_divided:
            self._team.agree_on_buffers()

    def default_hypergradient(self) -> Implicit:
        """Return finite differences with the identity: first-order passes through the serial network."""
        return Implicit(Identity(), product="finite_difference")

    def begin(self, batch: Any, weight: float) -> None:
        """Begin a step: note which samples the batch has, and the weight of this process's part of it."""
        # Of the last step: by now it is done, so looking at it makes no GPU wait.
        self._check_finite()
        self._share, self._is_open, self._step = weight, True, None
        self._slots = self._samples.slots(batch, self.key) if self.is_stored and self.stages > 1 else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages from their variables; what the last one returns goes on into the loss."""
        if self._point is not None:
            assert self._team is not None and self._step is not None
            return self._team.stages[-1](self._point, self._step.inputs)
        if not self._is_open:
            fault = f"{self.key}: the loss calls its module a second time in one step"
            raise ConfigError(f"{fault}. Join the inputs into one call, or remove parallel.")
        self._is_open = False
        inputs = bound(self._module, args, kwargs)
        team = self._team or self._build(inputs)
        self._step = step = self._describe(team, inputs)
        self._recorder.begin(self._num_steps, step.device)
        result = team.forward(step)
        if not team.has_last:
            raise _LastStageElsewhere
        return result

    def evaluate(self, loss: Callable[[], LossOutput]) -> LossOutput:
        """Return the loss, which the process of the last stage has; others receive it while their own stages go on."""
        self._loss, output = loss, None
        with suppress(_LastStageElsewhere):
            output = loss()
        if self.is_divided and self._team is not None:
            return self._shared(output, self._team)
        assert output is not None
        return output

    def _shared(self, output: LossOutput | None, team: Team) -> LossOutput:
        """Send what the last stage's process has as one tensor; elsewhere return zeros that it fills on arrival."""
        stages = self.transport.stages
        last = stages.size - 1
        if self._metrics is None:
            self._metrics = stages.gather([] if output is None else list(output.metrics))[last]
        if output is None:
            values = torch.zeros(1 + len(self._metrics), dtype=team.dtype, device=team.device)
            self.transport.expect("output", last, stages.rank, values)
            return LossOutput(values[0], dict(zip(self._metrics, values[1:], strict=True)))
        packed = [value.detach().to(team.device, team.dtype) for value in (output.loss, *output.metrics.values())]
        for stage in range(last):
            self.transport.send("output", last, stage, torch.stack(packed))
        return output

    def gradient(self, loss: Tensor, theta: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of the stages' own losses; then correct variables, multipliers and networks."""
        team, step = self._team, self._step
        if step is None or team is None:
            fault = f"{self.key}: the loss has not called its module in this step"
            raise ConfigError(f"{fault}. Call model(..) itself, not a method of it, or remove parallel.")
        slopes = team.backward(step, loss, theta, self._loss_at)
        if not team.has_last:
            stages = self.transport.stages
            self.transport.receive("output", stages.size - 1, stages.rank)
        self._num_steps += 1
        self._step = self._loss = None
        return slopes

    def _loss_at(self, point: Tensor) -> Tensor:
        """Return the loss of the batch at hand where the last stage begins at another point than its variables."""
        assert self._loss is not None
        self._point = point
        try:
            return self._loss().loss
        finally:
            self._point = None

    def statistics(self) -> Mapping[str, float]:
        """Return the constraint violations at each interface, absolute and relative, and beta."""
        if self._team is None or self.stages == 1:
            return {}
        self._check_finite()
        betas = [beta.at(max(self._num_steps - 1, 0)) for beta in self.betas]
        values = {f"beta_{number}": beta for number, beta in enumerate(betas, start=1)}
        values = values if len(set(betas)) > 1 else {"beta": betas[0]}
        for number, (violation, relative) in sorted(self._team.violations().items()):
            values |= {f"violation_{number}": violation, f"relative_violation_{number}": relative}
        return values | {f"curvature_{number}": value for number, value in self._team.curvatures().items()}

    def timeline(self) -> dict[str, Any] | None:
        """Return the recorded spans of all stages, and the last violations."""
        [first, *_] = self.transport.own(self.stages)
        spans = SpanRecorder.joined(list(self.transport.gathered({str(first): self._recorder.spans}).values()))
        if not spans:
            return None
        return {
            "stages": self.stages,
            "processes": self.stages if self.is_divided else 1,
            "spans": spans,
            "violation": {key: value for key, value in self.statistics().items() if key.startswith("violation")},
        }

    def forecast(self) -> Sequence[str]:
        """Return how well the stages are balanced, and the speed-up of equation 27, after recorded steps."""
        return forecast(() if self._team is None else self._team.cut, self.timeline())

    def state_dict(self) -> dict[str, Any]:
        """Return the variables, multipliers, networks, and counters."""
        if self._team is None:
            return dict(self._pending or {"is_built": False})
        return {
            "is_built": True,
            "num_steps": self._num_steps,
            "seed": self._seed,
            "samples": {"seen": self._samples.seen.clone()},
            "cut": list(self._team.cut),
            "stages": self._team.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned; before the first step it is kept until the stages are built."""
        if not state["is_built"]:
            self._team, self._pending, self._num_steps = None, None, 0
            self._samples = Samples(self.copies)
            return
        self._num_steps, self._seed = state["num_steps"], state["seed"]
        self._samples.seen = state["samples"]["seen"].cpu().clone()
        if self._team is None:
            self._pending = state
        else:
            self._team.load_state_dict(state["stages"])

    def _build(self, inputs: Inputs) -> Team:
        cut, kept = self.cut, None if self._pending is None else list(self._pending["cut"])
        if kept is not None and (cut is None or cut == MEASURED):
            # A run that goes on has the stages of its checkpoint.
            cut = kept
        chain = chain_for(self._module, self.key, inputs, None if isinstance(cut, str) else cut, self.stages)
        # Times differ: one process measures for all.
        stages, replicas = self.transport.stages, self.transport.replicas
        names = stages.of_first(lambda: replicas.of_first(lambda: balanced_cut(chain, self.stages, cut, self.key)))
        require(kept in (None, names), f"{self.key}.cut", names, f"the checkpoint's cuts {kept}")
        assert self._seed is not None, "A program has a seed for it."
        shared = self, self.transport, self._recorder, self._seed
        self._team = Team(self.key, self._module, chain.stages(names), names, inputs, *shared)
        if self._pending is not None:
            self._team.load_state_dict(self._pending["stages"])
            self._pending = None
        return self._team

    def _describe(self, team: Team, inputs: Inputs) -> StageStep:
        replicas, unseen = self.transport.replicas, None
        if self._slots is not None:
            [everybody] = replicas.gather_rows([self._slots])
            unseen = self._samples.meet(self._slots, everybody)
        states = team.shapes(inputs), team.dtype, team.device
        return StageStep(self, self._num_steps, inputs, *states, self._share, replicas.size, self._slots, unseen)

    def _check_finite(self) -> None:
        """Refuse stages that have parted so far that training goes nowhere; warn once where they part."""
        for number, worker in () if self._team is None else self._team.workers.items():
            if worker.violations is None:
                continue
            violation, size = worker.violations.tolist()
            if not violation <= max(DIVERGED * size, DIVERGED):
                beta = self.betas[number - 1].at(self._num_steps - 1)
                step, advice = self._num_steps, f"Lower {self.key}.beta, {self.key}.lambda_rate, or the learning rates."
                fault = f"{self.key}: the violation at interface {number} became {violation:.3g} at step {step}"
                raise RunError(f"{fault} with beta={beta:g} (states: {size:.3g}); the stages diverge. {advice}")
            if violation > PARTED * size and not self._has_warned:
                self._has_warned, times = True, f"{violation / max(size, TINY):.3g} times the states"
                fault = f"{self.key}: at interface {number} the violation is {times} (step {self._num_steps})"
                warnings.warn(f"{fault}. Raise {self.key}.beta, or lower {self.key}.lambda_rate.", stacklevel=2)
