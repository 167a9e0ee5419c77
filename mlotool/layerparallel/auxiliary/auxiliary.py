"""Layer-parallel training by auxiliary variables: the stand-in for a problem's module in its own training steps."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.errors import ConfigError, RunError
from mlotool.core.loss_output import LossOutput
from mlotool.core.slots import Places
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import Identity, Implicit
from mlotool.layerparallel.auxiliary.equations import Beta
from mlotool.layerparallel.auxiliary.exchange import AbstractExchange, LocalExchange, ProcessExchange
from mlotool.layerparallel.auxiliary.report import Report
from mlotool.layerparallel.auxiliary.samples import Samples
from mlotool.layerparallel.auxiliary.settings import Settings
from mlotool.layerparallel.auxiliary.step import StageStep
from mlotool.layerparallel.auxiliary.team import StagePlan, Team
from mlotool.layerparallel.auxiliary.timeline import Timeline
from mlotool.layerparallel.partition import Chain, Inputs
from mlotool.problem.parallel import AbstractParallel, StageDone

DIVERGED = 1e3
"""Violation, relative to the states or absolute, at which a run ends."""
PARTED = 10.0
"""The same, relative, at which it warns."""


class Auxiliary(AbstractParallel):
    """Cuts the module into K stages that run at the same time, each from an auxiliary variable lambda_k.

        min over theta, lambda of
        phi(X^{K-1}) + sum_k c (beta norm(lambda_k - X^{k-1})^2 - <kappa_k, lambda_k - X^{k-1}>)

    X^k is where stage k ends if it begins at lambda_k (lambda_0 is the input). Each stage steps along its own loss:
    `c (beta norm(lambda_{k+1} - X^k)^2 + <kappa_{k+1}, X^k>)`, the last one phi, the problem's loss. Then

        lambda_k <- lambda_k - eta (c (2 beta (lambda_k - X^{k-1}) - kappa_k) + d(loss of stage k)/d lambda_k)
        kappa_k  <- kappa_k - 2 beta (lambda_k - X^{k-1})

    Evaluation and hypergradients see the serial network. lambda, kappa and the networks below are training state: no
    part of theta, and in every checkpoint.

    The batch's `index` says which samples it has; stored variables of a sample that is seen for the first time are
    those of a serial pass. Random augmentation needs networks, or a finite number of `copies` of each sample.
    BatchNorm normalises by lambda's statistics while it trains; its running ones, which evaluation uses, are those of
    the stages' passes as well, unless `recalibrate` collects them from serial passes.

    Args:
        stages: K; 1 is backpropagation.
        cut: names of the layers or groups of layers that begin the stages 1 .. K-1; None balances the floating-point
            operations.
        method: `penalty` (kappa = 0), or `lagrangian`.
        variables: `stored` by sample; `auxnet`, lambda_{k+1} = AuxNet_k(lambda_k), or `recursive`,
            lambda_k = ReAuxNet_k(X_0), networks that learn to give the corrected variables.
        auxnet: a smaller module with the same inputs, of which parts are taken where its states have the shapes at the
            cuts (the paper's ResNet-20 for a ResNet-110); None thins out copies of the stages.
        auxnet_blocks: of a thinned copy, how many blocks that keep the shape remain.
        auxnet_lr: step size of these networks, once a batch.
        auxnet_optimizer: `sgd` or `adam`.
        distillation_steps: steps of the networks a batch.
        beta: a number, or {start, factor, every, maximum}: multiplied by `factor` each `every` steps. A larger one
            binds the stages closer and makes their local losses steeper: lower their learning rate with it.
        reduction: c is 1 over the number of elements (`mean`), or 1 (`sum`).
        lambda_rate: eta as a multiple of 1 / (2 c beta), the step that solves the stationarity of lambda (eq. 17) for
            the slope at hand; None is 1, and 0.1 for stored variables of more than two stages: the stages between have
            penalties of their own behind them, and whole steps overshoot.
        lambda_lr: eta itself, in place of `lambda_rate`.
        multiplier_rule: `exact`, 2 beta, or `paper`, eta / (2 beta) as it is printed, which is the inverse.
        noise: standard deviation of Gaussian noise on lambda.
        copies: augmented copies of each sample, for stored variables; the batch then has a `copy` beside its `index`
            (`data.augment` is that number).
        recalibrate: steps between two serial passes that collect BatchNorm's running statistics; 0 leaves that to the
            stages' passes.
        table_device: where stored variables are kept; None is where the module is.
        processes: run each stage in a process of its own, where there are several: rank = part * stages + stage, with
            as many parts of the batch as there are ranks for every stage. One rank runs all stages, and warns.
        streams: in one process on a GPU, whether each stage has a CUDA stream of its own.
        record: batches whose times are recorded.

    Raises:
        ConfigError: a setting is out of range, or settings do not go together.

    Cost: a step is the forward and backward pass of a stage, with as many processes as stages, plus that of an AuxNet.
    Stored variables are a state a sample and interface, and the same again for multipliers.

    Source: Sun et al. 2021, Layer-Parallel Training of Residual Networks with Auxiliary-Variable Networks
    (arXiv 2112.05387).

    Example:
        >>> from functools import partial
        >>> from mlotool import Problem
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        >>> problem = Problem("net", net, lambda batch, *, model: model(batch["input"]).square().mean(),
        ...                   roles={"model": "net"}, optimizer=partial(torch.optim.SGD, lr=0.1),
        ...                   parallel=Auxiliary(stages=2))
        >>> problem.parallel.num_stages
        2
    """

    def __init__(
        self,
        stages: int,
        cut: Sequence[str] | None = None,
        method: str = "penalty",
        variables: str = "stored",
        auxnet: nn.Module | None = None,
        auxnet_blocks: int = 1,
        auxnet_lr: float = 0.1,
        auxnet_optimizer: str = "sgd",
        distillation_steps: int = 1,
        beta: float | Mapping[str, float] = 10.0,
        reduction: str = "mean",
        lambda_lr: float | None = None,
        lambda_rate: float | None = None,
        multiplier_rule: str = "exact",
        noise: float = 0.0,
        copies: int = 1,
        recalibrate: int = 0,
        table_device: str | None = None,
        processes: bool = False,
        streams: bool = False,
        record: int = 0,
    ) -> None:
        if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
            raise ConfigError(
                f"parallel.stages: found {stages!r}; expected a whole number of at least 1. Correct parallel.stages."
            )
        if auxnet is not None and not isinstance(auxnet, nn.Module):
            raise ConfigError(
                f"parallel.auxnet: found {auxnet!r}; expected a smaller model, or null for thinned stages. "
                "Write auxnet: {_target_: mlotool.models.ResNet, ..}."
            )
        self.num_stages = stages
        self.settings = Settings(
            method=method,
            variables=variables,
            beta=Beta.of(beta, "parallel.beta"),
            reduction=reduction,
            multiplier_rule=multiplier_rule,
            lambda_lr=lambda_lr,
            lambda_rate=_rate(variables, stages) if lambda_rate is None else lambda_rate,
            auxnet_lr=auxnet_lr,
            auxnet_optimizer=auxnet_optimizer,
            auxnet_blocks=auxnet_blocks,
            distillation_steps=distillation_steps,
            noise=noise,
            copies=copies,
            recalibrate=recalibrate,
        )
        self.settings.check()
        self.exchange: AbstractExchange = LocalExchange()
        self._timeline = Timeline(record)
        self.num_steps = 0
        self._processes, self._has_lanes = processes, streams
        self._cut = None if cut is None else list(cut)
        self._auxnet = auxnet
        self._table_device = None if table_device is None else torch.device(table_device)
        # The seed of the run, the same in all processes; drawing a number would change what the run draws.
        self._seed = torch.initial_seed() % 2**62
        self._has_warned = False
        self._team: Team | None = None
        self._pending: Mapping[str, Any] | None = None
        self._samples = Samples(copies)
        self._slots: Tensor | None = None
        self._share = 1.0
        self._step: StageStep | None = None
        self._is_open = False
        self._report: Report | None = None
        self._is_moved = self._is_optimizer_moved = False

    def attach(self, name: str, module: nn.Module) -> None:
        """Trace the module and see where it may be cut."""
        self.key = f"problems.{name}.parallel"
        self._module = module
        self._chain = Chain(module, self.key)
        self._chain.check(self.num_stages, self._cut)
        if self._cut is not None:
            self._cut = self._chain.resolve(self._cut)
        self._places = Places(module)

    def check_data(self, dataset: Any) -> None:
        """Refuse stored variables of samples that come in another form each time."""
        is_random = getattr(dataset, "seeded", False) and not hasattr(
            getattr(dataset, "augmentation", None), "num_copies"
        )
        if is_random and self.settings.is_stored and self.num_stages > 1:
            raise ConfigError(
                f"{self.key}.variables: found stored, but the data are augmented anew each time; expected samples that "
                f"come again as they were. Set {self.key}.variables=auxnet, data.augment=false, or data.augment and "
                f"{self.key}.copies to a number of copies."
            )

    def to(self, device: torch.device) -> None:
        """Move networks and tables."""
        if self._auxnet is not None:
            self._auxnet.to(device)
        if self._team is not None:
            self._team.to(device)

    @property
    def is_repeatable(self) -> bool:
        """Each gradient moves the variables, so it is taken once."""
        return self.num_stages == 1

    @property
    def is_divided(self) -> bool:
        """Whether each stage is a process's own."""
        return self.exchange.is_divided

    def distribute(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Take a stage, or all of them, of a part of the batch."""
        if self._processes and num_ranks == 1:
            warnings.warn(
                f"{self.key}.processes: found true on one rank, which runs all {self.num_stages} stages one after the "
                f"other; expected a rank a stage. Set runner.devices={self.num_stages}, or leave processes out.",
                stacklevel=2,
            )
        if not self._processes or num_ranks == 1:
            self.exchange = LocalExchange(Ranks(rank, num_ranks))
            return rank, num_ranks
        exchange = ProcessExchange.join(rank, num_ranks, self.num_stages, self.key)
        self.exchange, self._report = exchange, Report(exchange)
        return exchange.replicas.rank, exchange.replicas.size

    def before_step(self) -> None:
        """The own stage's parameters move: the other processes have old ones until `sync`."""
        self._is_moved = self._is_optimizer_moved = True

    def sync(self, optimizer: Optimizer | None) -> None:
        """Give all processes of a part of the batch what each stage's own one has."""
        if self._team is None or not isinstance(self.exchange, ProcessExchange):
            return
        if self._is_moved:
            self._team.sync(self.exchange)
            self._is_moved = False
        if self._is_optimizer_moved and optimizer is not None:
            self._team.sync_optimizer(self.exchange, optimizer)
            self._is_optimizer_moved = False

    def agree_on_buffers(self) -> None:
        """Average the own stage's buffers over the parts of the batch, and give them to all."""
        if self._team is not None and isinstance(self.exchange, ProcessExchange):
            self._team.agree_on_buffers(self.exchange)

    def default_hypergradient(self) -> Implicit:
        """Return finite differences with the identity: first-order passes through the serial network."""
        return Implicit(Identity(), product="finite_difference")

    def begin(self, batch: Any, weight: float) -> None:
        """See which samples come."""
        if self._team is not None and self._team.device.type == "cuda":
            # Of the last step: by now it is done, so looking at it makes nothing wait.
            self._check_finite()
        self._share, self._is_open, self._step = weight, True, None
        is_stored = self.settings.is_stored and self.num_stages > 1
        self._slots = self._samples.slots(batch, self.key) if is_stored else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages from their variables; what the last one returns goes on into the loss."""
        if not self._is_open:
            raise ConfigError(
                f"{self.key}: the loss calls its module a second time in one step; expected once, since the stages "
                "are trained by what the call leaves behind. Join the inputs into one call, or remove parallel."
            )
        self._is_open = False
        inputs = self._chain.bind(args, kwargs)
        team = self._team or self._build(inputs)
        self._step = step = self._describe(team, inputs)
        self._timeline.begin(self.num_steps, step.device)
        found = team.forward(step)
        if not team.has_last:
            raise StageDone
        return found

    def publish(self, output: LossOutput) -> None:
        """Send the loss and its metrics to the other stages' processes."""
        if self._report is not None and self._team is not None:
            self._report.send(output, self._team.dtype, self._team.device)

    def output(self) -> LossOutput:
        """Return the loss of the last stage's process, which arrives while the own stage goes on."""
        assert self._report is not None and self._team is not None
        return self._report.expect(self._team.dtype, self._team.device)

    def gradient(self, loss: Tensor, theta: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of the stages' own losses; then correct variables, multipliers and networks."""
        if self._step is None or self._team is None:
            raise ConfigError(
                f"{self.key}: the loss has not called its module; expected model(..) once in each step, and no "
                "model.method(..). Call the module itself, or remove parallel."
            )
        found = self._team.backward(self._step, loss, theta)
        if self._report is not None and not self._team.has_last:
            self._report.receive()
        self.num_steps += 1
        if self._team.device.type != "cuda":
            self._check_finite()
        self._step = None
        return found

    def statistics(self) -> Mapping[str, float]:
        """Return the constraint violations at each interface, absolute and relative, and beta."""
        if self._team is None or self.num_stages == 1:
            return {}
        if self._team.device.type == "cuda":
            self._check_finite()
        found = {"beta": self.settings.beta.at(max(self.num_steps - 1, 0))}
        for number, (violation, relative) in sorted(self._team.violations().items()):
            found |= {f"violation_{number}": violation, f"relative_violation_{number}": relative}
        return found

    def timeline(self) -> dict[str, Any] | None:
        """Return the recorded spans of all stages, and the last violations."""
        [first, *_] = self.exchange.own(self.num_stages)
        spans = Timeline.joined(list(self.exchange.gathered({str(first): self._timeline.state()}).values()))
        if not spans:
            return None
        return {
            "stages": self.num_stages,
            "processes": self.num_stages if self.is_divided else 1,
            "spans": spans,
            "violation": {key: value for key, value in self.statistics().items() if key.startswith("violation")},
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the variables, multipliers, networks, and counters."""
        if self._team is None:
            return dict(self._pending or {"is_built": False})
        return {
            "is_built": True,
            "num_steps": self.num_steps,
            "seed": self._seed,
            "samples": self._samples.state_dict(),
            "cut": list(self._team.cut),
            "stages": self._team.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take them back; before the first step, once the stages are built."""
        if not state["is_built"]:
            self._team, self._pending, self.num_steps = None, None, 0
            self._samples.forget()
            return
        self.num_steps, self._seed = state["num_steps"], state["seed"]
        self._samples.load_state_dict(state["samples"])
        if self._team is None:
            self._pending = state
        else:
            self._team.load_state_dict(state["stages"])

    def _build(self, inputs: Inputs) -> Team:
        cut = self._chain.balance(self.num_stages, inputs) if self._cut is None else self._cut
        if self._pending is not None and list(self._pending["cut"]) != list(cut):
            raise ConfigError(
                f"{self.key}: the checkpoint has the cuts {list(self._pending['cut'])}, this run {list(cut)}; expected "
                f"the same. Set {self.key}.cut to those of the checkpoint."
            )
        plan = StagePlan(self.key, self._module, self._chain.stages(cut), cut, inputs, self._places)
        self._team = Team(
            plan,
            self.settings,
            self.exchange,
            self._timeline,
            self._seed,
            self._auxnet,
            self._table_device,
            self._has_lanes,
        )
        if self._pending is not None:
            self._team.load_state_dict(self._pending["stages"])
            self._pending = None
        return self._team

    def _describe(self, team: Team, inputs: Inputs) -> StageStep:
        size = next((len(each) for each in inputs if isinstance(each, Tensor) and each.ndim), 1)
        unseen = None
        if self._slots is not None:
            [everybody] = self.exchange.replicas.gather_rows([self._slots])
            unseen = self._samples.meet(self._slots, everybody)
        every = self.settings.recalibrate
        return StageStep(
            inputs,
            size,
            team.shapes(inputs),
            team.dtype,
            team.device,
            self.settings.beta.at(self.num_steps),
            self.settings.reduction,
            self._share,
            self.exchange.replicas.size,
            self._slots,
            unseen,
            moves_buffers=every > 0 and self.num_steps % every == 0,
            freezes_buffers=every > 0,
            num_collected=self.num_steps // every if every else 0,
        )

    def _check_finite(self) -> None:
        assert self._team is not None
        for number, worker in self._team.workers.items():
            if worker.violations is None:
                continue
            violation, size = worker.violations.tolist()
            if not violation <= max(DIVERGED * size, DIVERGED):
                beta = self.settings.beta.at(self.num_steps - 1)
                raise RunError(
                    f"{self.key}: the violation at interface {number} became {violation:.3g} at step "
                    f"{self.num_steps} with beta={beta:g}, beside states of norm {size:.3g}; expected a small part of "
                    f"that. The stages diverge: lower {self.key}.beta (or the factor of its schedule), "
                    f"{self.key}.lambda_rate, or the learning rates of the stages and of their networks."
                )
            if violation > PARTED * size and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"{self.key}: at interface {number} the violation is {violation / max(size, 1e-12):.3g} times the "
                    f"states (step {self.num_steps}), so the stages train on states that the serial network does not "
                    f"have. Raise {self.key}.beta where it is small, or lower {self.key}.lambda_rate.",
                    stacklevel=2,
                )


def _rate(variables: str, stages: int) -> float:
    return 0.1 if variables == "stored" and stages > 2 else 1.0
