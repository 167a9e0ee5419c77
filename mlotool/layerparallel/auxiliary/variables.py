"""Where auxiliary variables come from, and how they are corrected: a table, a chain of networks, or one network each.

One object a stage. Interface k lies between the stages k - 1 and k; lambda_k is where stage k begins.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from mlotool.layerparallel.auxiliary.auxnet import AuxNet
from mlotool.layerparallel.auxiliary.equations import next_multiplier
from mlotool.layerparallel.auxiliary.exchange import AbstractExchange
from mlotool.layerparallel.auxiliary.settings import Settings
from mlotool.layerparallel.auxiliary.step import StageStep
from mlotool.layerparallel.auxiliary.table import Table

# s: samples of a batch, ...: the shape of a state


class AbstractVariables(ABC):
    """The variables that one stage needs: lambda_k where it begins, lambda_{k+1} at which its end is aimed.

    Args:
        number: k, of the stage.
        num_stages: K.
        settings: of the method.
        exchange: with the neighbours.
        seed: of the noise.
    """

    def __init__(self, number: int, num_stages: int, settings: Settings, exchange: AbstractExchange, seed: int) -> None:
        self.number = number
        self.num_stages = num_stages
        self.settings = settings
        self.exchange = exchange
        self.own: Tensor | None = None
        self._seed = seed
        self._generator: torch.Generator | None = None

    @property
    def is_first(self) -> bool:
        """Whether there is no interface before the stage."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether there is none behind it."""
        return self.number == self.num_stages - 1

    def start(self, step: StageStep, state: Tensor) -> None:
        """See where a serial pass enters the stage, (s, ...)."""

    @abstractmethod
    def prepare(self, step: StageStep) -> None:
        """Find lambda_k, as `own`, and hand on what the neighbours need."""

    @abstractmethod
    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return lambda_{k+1} and kappa_{k+1} (None is zero), for a stage but the last."""

    def multiplier(self) -> Tensor | None:
        """Return kappa_k; None is zero."""
        return None

    @abstractmethod
    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """Move lambda_k and kappa_k.

        Args:
            step: the one at hand.
            state: X^{k-1}, where the stage before has ended.
            slope: derivative of the augmented Lagrangian with respect to lambda_k.
        """

    def await_variable(self, step: StageStep) -> None:
        """Wait for what `prepare` needs of other stages, apart from it: waiting is no work."""

    def await_slope(self, step: StageStep) -> None:
        """Wait for what `finish` needs of other stages."""

    def finish(self, step: StageStep) -> None:
        """Do what is left once the next stage has corrected its variables."""

    def to(self, device: torch.device) -> None:
        """Move what is kept to a device."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept from step to step."""
        return {"noise": None if self._generator is None else self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take it back."""
        self._generator = None
        if state["noise"] is not None:
            self._generator = torch.Generator(device)
            self._generator.set_state(state["noise"].cpu())

    def _perturbed(self, step: StageStep, clean: Tensor) -> Tensor:
        if not self.settings.noise:
            return clean
        if self._generator is None:
            self._generator = torch.Generator(clean.device).manual_seed(self._seed)
        # For the whole batch, of which this is a part: the noise does not depend on the number of parts.
        begin, size = step.rows(self.exchange.replicas.rank)
        shape = size, *clean.shape[1:]
        drawn = torch.randn(shape, dtype=clean.dtype, device=clean.device, generator=self._generator)
        return clean + self.settings.noise * drawn[begin : begin + len(clean)]

    def _step_size(self, step: StageStep, interface: int) -> float:
        return self.settings.step_size(step.beta, step.own_weight(interface)) if step.share else 0.0


class StoredVariables(AbstractVariables):
    """lambda_k and kappa_k of every sample, kept from one visit to the next."""

    def __init__(
        self,
        number: int,
        num_stages: int,
        settings: Settings,
        exchange: AbstractExchange,
        seed: int,
    ) -> None:
        super().__init__(number, num_stages, settings, exchange, seed)
        device = settings.device_of_tables
        self._variables, self._multipliers = Table(device), Table(device)
        self._clean: Tensor | None = None
        self._multiplier: Tensor | None = None

    def start(self, step: StageStep, state: Tensor) -> None:
        """A sample that is seen for the first time begins where the serial pass stands."""
        if not self.is_first and step.unseen is not None and step.slots is not None:
            self._variables.put(step.slots[step.unseen], state[step.unseen.to(state.device)])

    def prepare(self, step: StageStep) -> None:
        """Look up, and tell the stage before."""
        number, send = self.number, self.exchange.send
        if not self.is_first:
            assert step.slots is not None
            self._clean = self._variables.get(step.slots, step.blank(number))
            self.own = self._perturbed(step, self._clean)
            send("variable", number, number - 1, self.own)
            if self.settings.has_multipliers:
                self._multiplier = self._multipliers.get(step.slots, step.blank(number))
                send("multiplier", number, number - 1, self._multiplier)
        if not self.is_last:
            self.exchange.expect("variable", number + 1, number, step.blank(number + 1))
            if self.settings.has_multipliers:
                self.exchange.expect("multiplier", number + 1, number, step.blank(number + 1))

    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return what the next stage has looked up."""
        receive, number = self.exchange.receive, self.number
        variable = receive("variable", number + 1, number)
        return variable, receive("multiplier", number + 1, number) if self.settings.has_multipliers else None

    def multiplier(self) -> Tensor | None:
        """Return kappa_k, as it was looked up."""
        return self._multiplier

    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """lambda <- lambda - eta slope, then kappa <- kappa - rate (lambda - X)."""
        assert self._clean is not None and step.slots is not None
        step_size = self._step_size(step, self.number)
        moved = [self._clean - step_size * slope]
        if self._multiplier is not None:
            rate = self.settings.multiplier_rate(step.beta, step_size)
            moved.append(next_multiplier(self._multiplier, moved[0], state, rate))
        # A part without samples of its own stands in with another part's.
        slots = step.slots if step.share else step.slots[:0]
        slots, *moved = self.exchange.replicas.gather_rows([slots, *(each[: len(slots)] for each in moved)])
        for table, values in zip((self._variables, self._multipliers), moved, strict=False):
            table.put(slots, values)
        self._clean = self._multiplier = None

    def to(self, device: torch.device) -> None:
        """Move the tables."""
        self._variables.to(device)
        self._multipliers.to(device)

    def state_dict(self) -> dict[str, Any]:
        """Return the tables."""
        tables = {"variables": self._variables.state_dict(), "multipliers": self._multipliers.state_dict()}
        return {**super().state_dict(), **tables}

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take them back."""
        super().load_state_dict(state, device)
        self._variables.load_state_dict(state["variables"])
        self._multipliers.load_state_dict(state["multipliers"])
        self.to(device)


class AbstractNetworkVariables(AbstractVariables):
    """Variables that a network of this stage gives; it learns to give the corrected ones.

        xi <- optimizer step on c norm(lambda' - net(given; xi))^2,    lambda' = lambda - eta slope

    One such step of gradient descent at rate eta_aux is eq. 29 at rate 2 c eta_aux eta. Noise moves the point at
    which the slope is taken, not what is learned from it.

    Args:
        network: this stage's; None where it has none.
    """

    def __init__(
        self,
        number: int,
        num_stages: int,
        settings: Settings,
        exchange: AbstractExchange,
        seed: int,
        network: AuxNet | None,
    ) -> None:
        super().__init__(number, num_stages, settings, exchange, seed)
        self.network = network
        self._optimizer: Optimizer | None = None
        if network is not None:
            kind = SGD if settings.auxnet_optimizer == "sgd" else Adam
            self._optimizer = kind(network.parameters(), lr=settings.auxnet_lr)
        self._given: Tensor | None = None
        self._found: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the network and its optimizer."""
        state = super().state_dict()
        if self.network is not None and self._optimizer is not None:
            network = {name: tensor.clone() for name, tensor in self.network.state_dict().items()}
            state |= {"network": network, "optimizer": self._optimizer.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any], device: torch.device) -> None:
        """Take them back."""
        super().load_state_dict(state, device)
        if self.network is not None and self._optimizer is not None:
            self.network.load_state_dict(state["network"])
            self._optimizer.load_state_dict(state["optimizer"])

    def to(self, device: torch.device) -> None:
        """Move the network; its optimizer's state follows with the next load."""
        if self.network is not None:
            self.network.to(device)

    def _propose(self, step: StageStep, given: Tensor | None) -> Tensor:
        """Return what the network gives from a state, perturbed; its graph is kept for the first distillation step."""
        assert self.network is not None
        self._given, self._found = given, self._run(step, given)
        return self._perturbed(step, self._found.detach())

    def _run(self, step: StageStep, given: Tensor | None) -> Tensor:
        assert self.network is not None
        found: Tensor = self.network(given, step.inputs).to(step.dtype)
        return found

    def _distill(self, step: StageStep, interface: int, slope: Tensor) -> None:
        """Let the network learn the variables of an interface after their correction along `-slope`."""
        assert self.network is not None and self._optimizer is not None and self._found is not None
        found, weight = self._found, step.weight(interface)
        target = found.detach() - self._step_size(step, interface) * slope
        parameters = list(self.network.parameters())
        for number in range(self.settings.distillation_steps):
            if number:
                found = self._run(step, self._given)
            loss = weight * (target - found).square().sum()
            for parameter, gradient in zip(
                parameters, self.exchange.replicas.mean(_slopes(loss, parameters)), strict=True
            ):
                parameter.grad = gradient
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._given = self._found = None


class ChainVariables(AbstractNetworkVariables):
    """lambda_{k+1} = AuxNet_k(lambda_k): stage k owns AuxNet_k, and the next stage tells it the slope.

    Source: Sun et al. 2021, eq. 25, 26 and algorithm 1.
    """

    def await_variable(self, step: StageStep) -> None:
        """Take lambda_k from the stage before."""
        number = self.number
        if not self.is_first:
            self.exchange.expect("variable", number - 1, number, step.blank(number))
            self.own = self.exchange.receive("variable", number - 1, number)

    def prepare(self, step: StageStep) -> None:
        """Hand lambda_{k+1} on."""
        if not self.is_last:
            self._target = self._propose(step, self.own)
            self.exchange.send("variable", self.number, self.number + 1, self._target)

    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return what AuxNet_k gave."""
        return self._target, None

    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """Tell the stage before, whose network gave lambda_k."""
        self.exchange.send("slope", self.number, self.number - 1, slope)

    def await_slope(self, step: StageStep) -> None:
        """Hear how the next stage has corrected lambda_{k+1}."""
        number = self.number
        if not self.is_last:
            self.exchange.expect("slope", number + 1, number, step.blank(number + 1))
            self._slope = self.exchange.receive("slope", number + 1, number)

    def finish(self, step: StageStep) -> None:
        """Learn from it."""
        if not self.is_last:
            self._distill(step, self.number + 1, self._slope)


class RecursiveVariables(AbstractNetworkVariables):
    """lambda_k = ReAuxNet_k(X_0): every stage k > 0 owns a network from the inputs to its own beginning.

    Source: Sun et al. 2021, eq. 28, 29.
    """

    def prepare(self, step: StageStep) -> None:
        """Compute lambda_k from the inputs, and tell the stage before."""
        number = self.number
        if not self.is_first:
            self.own = self._propose(step, None)
            self.exchange.send("variable", number, number - 1, self.own)
        if not self.is_last:
            self.exchange.expect("variable", number + 1, number, step.blank(number + 1))

    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return what the next stage's network gave."""
        return self.exchange.receive("variable", self.number + 1, self.number), None

    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """Learn from the own slope."""
        self._distill(step, self.number, slope)


def _slopes(loss: Tensor, parameters: list[torch.nn.Parameter]) -> list[Tensor]:
    found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return [each.contiguous() for each in found]
