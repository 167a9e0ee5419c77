"""Layer-parallel training by auxiliary variables: the stand-in for a problem's module in its own training steps."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mlotool.core.errors import ConfigError
from mlotool.core.loss_output import LossOutput
from mlotool.distributed.collectives import Ranks
from mlotool.hypergradient import Identity, Implicit
from mlotool.layerparallel.auxiliary.forecast import forecast
from mlotool.layerparallel.auxiliary.run import StageRun
from mlotool.layerparallel.auxiliary.settings import Settings, lambda_rates, of_interfaces
from mlotool.layerparallel.auxiliary.step_schedule import StepSchedule
from mlotool.layerparallel.auxiliary.timeline import Timeline
from mlotool.layerparallel.auxiliary.transport import AbstractTransport, LocalTransport, ProcessTransport
from mlotool.layerparallel.partition.choice import Cut, check_cut
from mlotool.problem.parallel import AbstractParallel


@dataclass(eq=False, repr=False)
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
        cut: names of the layers or groups of layers that begin the stages 1 .. K-1. None balances counted operations,
            the same in each run; `measured` the times of the first batch on this machine. How well the stages are
            balanced is said at the first step, with a warning where the longest takes 1.3 of the mean.
        method: `penalty` (kappa = 0), or `lagrangian`.
        variables: `stored` by sample; `auxnet`, lambda_{k+1} = AuxNet_k(lambda_k), or `recursive`,
            lambda_k = ReAuxNet_k(X_0), networks that learn to give the corrected variables.
        auxnet: a smaller module with the same inputs, of which parts are taken where its states have the shapes at the
            cuts (the paper's ResNet-20 for a ResNet-110); None thins out copies of the stages.
        auxnet_blocks: of a thinned copy, how many blocks that keep the shape remain.
        auxnet_lr: step size of these networks, once a batch: a number, or {start, factor, every, maximum}, as of beta.
            Let it fall as the problem's own rate does, so that stages and variables meet at the end.
        auxnet_optimizer: `sgd` or `adam`.
        auxnet_gradient: from what the networks of `auxnet` learn. `local` is the paper's: AuxNet_{k-1} from what stage
            k makes of lambda_k. `chain`: also from what AuxNet_k makes of it, whose derivative goes back from network
            to network, so that stages and networks follow the gradient of one objective (where the rates of all
            interfaces are equal, and `lambda_steps` is 1). It is more accurate between three stages or more; the
            backward passes of the networks wait for each other, as the forward ones do. Networks of `recursive` and
            those between two stages have the whole gradient by either.
        distillation_steps: steps of the networks a batch.
        beta: a number, or {start, factor, every, maximum}: multiplied by `factor` each `every` steps; or a list of
            K-1 of these, one for each interface. A larger one binds the stages closer and makes their local losses
            steeper: lower their learning rate with it.
        reduction: c is 1 over the number of elements (`mean`), or 1 (`sum`).
        lambda_rate: eta as a multiple of 1 / (2 c beta), the step that solves the stationarity of lambda (eq. 17) for
            the slope at hand; or a list of K-1, one for each interface. `auto` is 1 / (1 + curvature), which is stable
            while the curvature stays: that of the stage's own loss, relative to the penalty's, is estimated every 20
            steps. With a penalty
            behind the stage it is the largest eigenvalue of J^T J, of the stage's Jacobian J. None is 1, and 0.5 for
            stored variables with a penalty behind their stage too, which overshoot by whole steps.
        lambda_steps: steps of lambda at each visit; each after the first takes a pass of the stage more.
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

    stages: int
    cut: Cut = None
    method: str = "penalty"
    variables: str = "stored"
    auxnet: nn.Module | None = None
    auxnet_blocks: int = 1
    auxnet_lr: float | Mapping[str, float] = 0.1
    auxnet_optimizer: str = "sgd"
    auxnet_gradient: str = "local"
    distillation_steps: int = 1
    beta: float | Mapping[str, float] | Sequence[Any] = 10.0
    reduction: str = "mean"
    lambda_lr: float | None = None
    lambda_rate: float | str | Sequence[float | str] | None = None
    lambda_steps: int = 1
    multiplier_rule: str = "exact"
    noise: float = 0.0
    copies: int = 1
    recalibrate: int = 0
    table_device: str | None = None
    processes: bool = False
    streams: bool = False
    record: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.stages, int) or isinstance(self.stages, bool) or self.stages < 1:
            raise ConfigError(
                f"parallel.stages: found {self.stages!r}; expected a whole number of at least 1. Correct "
                "parallel.stages."
            )
        if self.auxnet is not None and not isinstance(self.auxnet, nn.Module):
            raise ConfigError(
                f"parallel.auxnet: found {self.auxnet!r}; expected a smaller model, or null for thinned stages. "
                "Write auxnet: {_target_: mlotool.models.ResNet, ..}."
            )
        check_cut(self.cut, "parallel.cut")
        self.settings = Settings.of(
            self,
            betas=[
                StepSchedule.of(each, "parallel.beta")
                for each in of_interfaces(self.beta, self.stages, "parallel.beta")
            ],
            auxnet_lr=StepSchedule.of(self.auxnet_lr, "parallel.auxnet_lr"),
            lambda_rates=lambda_rates(self.lambda_rate, self.stages, self.variables, "parallel.lambda_rate"),
        )
        self.settings.check()
        self._run = StageRun(self.settings, Timeline(self.record))

    @property
    def num_stages(self) -> int:
        """K, the number of stages."""
        return self.stages

    @property
    def transport(self) -> AbstractTransport:
        """How the stages hand tensors to each other."""
        return self._run.transport

    def attach(self, name: str, module: nn.Module) -> None:
        """Trace the module, and find the layers before which it may be cut."""
        self.key = f"problems.{name}.parallel"
        self._run.attach(self.key, module, self.cut)

    def seed(self, seed: int) -> None:
        """Take the seed of the program, the same in all processes; drawing one would change what the run draws."""
        self._run.seed(seed)

    def check_data(self, dataset: Any) -> None:
        """Refuse stored variables of samples that come in another form each time."""
        is_random = getattr(dataset, "seeded", False) and not hasattr(
            getattr(dataset, "augmentation", None), "num_copies"
        )
        if is_random and self.settings.is_stored and self.stages > 1:
            raise ConfigError(
                f"{self.key}.variables: found stored, but the data are augmented anew each time; expected samples that "
                f"come again as they were. Set {self.key}.variables=auxnet, data.augment=false, or data.augment and "
                f"{self.key}.copies to a number of copies."
            )

    def to(self, device: torch.device) -> None:
        """Move the networks and tables of auxiliary variables to a device."""
        self._run.to(device)

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
            warnings.warn(
                f"{self.key}.processes: found true on one rank, which runs all {self.stages} stages one after the "
                f"other; expected a rank a stage. Set runner.devices={self.stages}, or leave processes out.",
                stacklevel=2,
            )
        if not self.processes or num_ranks == 1:
            self._run.join(LocalTransport(Ranks(rank, num_ranks)))
            return rank, num_ranks
        transport = ProcessTransport.join(rank, num_ranks, self.stages, self.key)
        self._run.join(transport)
        return transport.replicas.rank, transport.replicas.size

    def before_step(self) -> None:
        """Note that this stage's parameters are about to move: the other processes have old ones until `sync`."""
        self._run.before_step()

    def sync(self, optimizer: Optimizer | None) -> None:
        """Give each process the parameters, buffers and optimizer state of the stages that other processes move."""
        self._run.sync(optimizer)

    def agree_on_buffers(self) -> None:
        """Average the buffers of each stage over the parts of the batch, and give them to all processes."""
        self._run.agree_on_buffers()

    def default_hypergradient(self) -> Implicit:
        """Return finite differences with the identity: first-order passes through the serial network."""
        return Implicit(Identity(), product="finite_difference")

    def begin(self, batch: Any, weight: float) -> None:
        """Begin a step: note which samples the batch has, and the weight of this process's part of it."""
        self._run.begin(batch, weight)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages from their variables; what the last one returns goes on into the loss."""
        return self._run(*args, **kwargs)

    def evaluate(self, loss: Callable[[], LossOutput]) -> LossOutput:
        """Return the loss, which the process of the last stage has; others receive it while their own stages go on."""
        return self._run.evaluate(loss)

    def gradient(self, loss: Tensor, theta: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of the stages' own losses; then correct variables, multipliers and networks."""
        return self._run.gradient(loss, theta)

    def statistics(self) -> Mapping[str, float]:
        """Return the constraint violations at each interface, absolute and relative, and beta."""
        return self._run.statistics()

    def timeline(self) -> dict[str, Any] | None:
        """Return the recorded spans of all stages, and the last violations."""
        return self._run.timeline()

    def forecast(self) -> Sequence[str]:
        """Return how well the stages are balanced, and the speed-up of equation 27, after recorded steps."""
        return forecast(self._run.cut, self.timeline())

    def state_dict(self) -> dict[str, Any]:
        """Return the variables, multipliers, networks, and counters."""
        return self._run.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` has returned; before the first step it is kept until the stages are built."""
        self._run.load_state_dict(state)
