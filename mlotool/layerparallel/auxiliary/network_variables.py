"""Auxiliary variables that networks give: a chain of networks from interface to interface, or one from the inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, Optimizer

from mlotool.layerparallel.auxiliary.auxnet import AuxNet
from mlotool.layerparallel.auxiliary.settings import AuxiliarySettings
from mlotool.layerparallel.auxiliary.step import StageStep
from mlotool.layerparallel.auxiliary.variables import AbstractVariables
from mlotool.layerparallel.exchange import Transport

# s: samples of a batch, ...: the shape of a state


class _AbstractNetworkVariables(AbstractVariables):
    """Variables that a network of this stage gives; it learns to give the corrected ones.

        xi <- optimizer step on c norm(lambda' - net(given; xi))^2,    lambda' = lambda - eta slope

    One such step of gradient descent at rate eta_aux is eq. 29 at rate 2 c eta_aux eta. Noise moves the point at which
    the slope is taken, not what is learned from it.

    Args:
        network: this stage's; None where it has none.
    """

    def __init__(
        self, number: int, settings: AuxiliarySettings, transport: Transport, seed: int, network: AuxNet | None
    ) -> None:
        super().__init__(number, settings, transport, seed)
        self.network = network
        self._optimizer: Optimizer | None = None
        if network is not None:
            kind = SGD if settings.auxnet_optimizer == "sgd" else Adam
            self._optimizer = kind(network.parameters(), lr=settings.auxnet_rate.start)
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
        if given is not None and self.settings.is_chained:
            given = given.detach().requires_grad_()
        self._given, self._found = given, self._run(step, given)
        return self._perturbed(step, self._found.detach().contiguous())

    def _run(self, step: StageStep, given: Tensor | None) -> Tensor:
        assert self.network is not None
        found: Tensor = self.network(given, step.inputs).to(step.dtype)
        return found

    def _distill(
        self, step: StageStep, interface: int, slope: Tensor, give_back: Callable[[Tensor], None] | None = None
    ) -> None:
        """Let the network learn the variables of an interface after their correction along `-slope`.

        Args:
            step: the one at hand.
            interface: whose variables the network gives.
            slope: (s, ...), of these variables.
            give_back: takes J^T slope, (s, ...), with the Jacobian J of the network in what it has been given, as soon
                as it is known; None: nobody wants it.
        """
        assert self.network is not None and self._optimizer is not None and self._found is not None
        found, weight, size = self._found, step.weight(interface), step.step_size(interface)
        target = found.detach() - size * slope
        parameters = list(self.network.parameters())
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.auxnet_rate.at(step.number)
        for number in range(self.settings.distillation_steps):
            if number:
                found = self._run(step, self._given)
            if give_back is not None and number == 0:
                assert self._given is not None
                *slopes, onward = _slopes(found, [*parameters, self._given], slope)
                give_back(onward)
                # That of the loss below, where it begins.
                slopes = [2.0 * weight * size * each for each in slopes]
            else:
                slopes = _slopes(weight * (target - found).square().sum(), parameters)
            for parameter, gradient in zip(parameters, self.transport.replicas.mean(slopes), strict=True):
                parameter.grad = gradient
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._given = self._found = None


class ChainVariables(_AbstractNetworkVariables):
    """A chain of networks gives the variables: lambda_{k+1} = AuxNet_k(lambda_k), with lambda_0 the inputs.

    Stage k has AuxNet_k. Stage k + 1 sends it the derivative with respect to lambda_{k+1}, from which AuxNet_k learns.
    With `auxnet_gradient=chain` that is the total one: lambda_{k+2} depends on lambda_{k+1} by AuxNet_{k+1}.

    Args:
        number: k, of the stage.
        settings: how the stages are trained.
        transport: to and from the neighbours.
        seed: of the noise on auxiliary variables.
        network: AuxNet_k; None for the last stage.

    Source: Sun et al. 2021, arXiv 2112.05387, eq. 25, 26 and algorithm 1.

    Example:
        >>> settings = AuxiliarySettings(stages=2, variables="auxnet")
        >>> network = AuxNet([torch.nn.PReLU()], is_first=True)
        >>> first = ChainVariables(0, settings, Transport(), seed=0, network=network)
        >>> inputs, shapes = (torch.ones(1, 3),), [torch.Size([3])]
        >>> first.prepare(StageStep(settings, 0, inputs, shapes, torch.float32, torch.device("cpu")))
        >>> first.target()  # lambda_1 and kappa_1, which is zero
        (tensor([[1., 1., 1.]]), None)
    """

    def await_variable(self, step: StageStep) -> None:
        """Receive lambda_k from the stage before."""
        number = self.number
        if not self.is_first:
            self.transport.expect("variable", number - 1, number, step.blank(number))
            self.own = self.transport.receive("variable", number - 1, number)

    def prepare(self, step: StageStep) -> None:
        """Compute lambda_{k+1} by AuxNet_k, and send it to the next stage."""
        if not self.is_last:
            self._target = self._propose(step, self.own)
            self.transport.send("variable", self.number, self.number + 1, self._target)

    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return the lambda_{k+1} that AuxNet_k has given."""
        return self._target, None

    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """Send the derivative with respect to lambda_k to the stage before, whose network learns from it.

        Where the next network has been given lambda_k, `finish` does that, once that network's part is known.
        """
        if self.settings.is_chained and not self.is_last:
            self._local_slope = slope
        else:
            self.transport.send("slope", self.number, self.number - 1, slope)

    def await_slope(self, step: StageStep) -> None:
        """Receive the derivative with respect to lambda_{k+1} from the next stage."""
        number = self.number
        if not self.is_last:
            self.transport.expect("slope", number + 1, number, step.blank(number + 1))
            self._slope = self.transport.receive("slope", number + 1, number)

    def finish(self, step: StageStep) -> None:
        """Let AuxNet_k learn from that derivative."""
        if self.is_last:
            return
        is_asked = self.settings.is_chained and not self.is_first
        self._distill(step, self.number + 1, self._slope, self._give_back if is_asked else None)

    def _give_back(self, onward: Tensor) -> None:
        """Send the stage before the total derivative with respect to lambda_k, of which `onward` is the network's."""
        self.transport.send("slope", self.number, self.number - 1, (self._local_slope + onward).contiguous())


class RecursiveVariables(_AbstractNetworkVariables):
    """A network for each stage gives its variables from the inputs of the module: lambda_k = ReAuxNet_k(X_0).

    Args:
        number: k, of the stage.
        settings: how the stages are trained.
        transport: to and from the neighbours.
        seed: of the noise on auxiliary variables.
        network: ReAuxNet_k; None for the first stage.

    Source: Sun et al. 2021, arXiv 2112.05387, eq. 28, 29.

    Example:
        >>> settings = AuxiliarySettings(stages=2, variables="recursive")
        >>> network = AuxNet([torch.nn.PReLU()], is_first=True)
        >>> last = RecursiveVariables(1, settings, Transport(), seed=0, network=network)
        >>> inputs, shapes = (torch.ones(1, 3),), [torch.Size([3])]
        >>> last.prepare(StageStep(settings, 0, inputs, shapes, torch.float32, torch.device("cpu")))
        >>> last.own
        tensor([[1., 1., 1.]])
    """

    def prepare(self, step: StageStep) -> None:
        """Compute lambda_k from the inputs, and send it to the stage before."""
        number = self.number
        if not self.is_first:
            self.own = self._propose(step, None)
            self.transport.send("variable", number, number - 1, self.own)
        if not self.is_last:
            self.transport.expect("variable", number + 1, number, step.blank(number + 1))

    def target(self) -> tuple[Tensor, Tensor | None]:
        """Return the lambda_{k+1} that the next stage's network has given."""
        return self.transport.receive("variable", self.number + 1, self.number), None

    def correct(self, step: StageStep, state: Tensor, slope: Tensor) -> None:
        """Let this stage's network learn from the derivative with respect to lambda_k."""
        self._distill(step, self.number, slope)


def _slopes(found: Tensor, points: Sequence[Tensor], weights: Tensor | None = None) -> list[Tensor]:
    slopes = torch.autograd.grad(found, points, weights, allow_unused=True, materialize_grads=True)
    return [each.contiguous() for each in slopes]
