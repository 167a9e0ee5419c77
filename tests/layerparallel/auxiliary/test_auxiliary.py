"""All stages in one process: against one joint objective by plain autograd, and against backpropagation."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mlotool.core.errors import ConfigError, RunError
from mlotool.data import CropAndFlip, InMemoryDataset, Normalization
from mlotool.hypergradient import SABA, Identity, Implicit
from mlotool.layerparallel import Auxiliary
from mlotool.layerparallel.auxiliary.variables import StageStep, StepSchedule
from mlotool.program import Program, Schedule, Stream
from tests.layerparallel.auxiliary.small import (
    KINDS,
    Rows,
    alone,
    auxiliary,
    follow,
    reweighted,
    sgd,
    squared_error,
    stack,
)
from tests.program.small import assert_identical, parameters

# Stages of a few numbers each cannot be balanced.
pytestmark = pytest.mark.filterwarnings("ignore:.* times their mean:UserWarning")


def test_a_schedule_is_multiplied_until_it_is_as_large_as_it_may_be() -> None:
    """However many the steps: 10^400 is no floating-point number."""
    grown = StepSchedule.of({"start": 2.0, "factor": 10.0, "every": 3, "maximum": 150.0})
    assert [grown.at(step) for step in (0, 2, 3, 5, 6, 9, 1200)] == [2.0, 2.0, 20.0, 20.0, 150.0, 150.0, 150.0]
    assert StepSchedule.of(7).at(1000) == 7
    endless = StepSchedule.of({"start": 2, "factor": 10, "maximum": float("inf")})
    assert endless.at(400) == float("inf")
    assert StepSchedule.of({"start": 2.0, "factor": 0.1}).at(400) == 0.0


@pytest.mark.parametrize("norm", [False, True])
def test_one_stage_is_backpropagation(norm: bool) -> None:
    momentum = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    programs = [
        alone(parallel, stack(norm=norm, dropout=0.2), optimizer=momentum) for parallel in (None, Auxiliary(stages=1))
    ]
    states = []
    for program in programs:
        torch.manual_seed(0)
        follow(program, 7)
        states.append(program.problems["net"].module.state_dict())
    assert_identical(*states)


def joint(
    net: nn.Sequential, tables: list[Tensor], multipliers: list[Tensor], batch: Any, beta: float, weights: list[float]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return L(theta, lambda) of the three stages 0:1, 1:3, 3: as one graph, the variables in it, and the X."""
    index = batch["index"]
    variables = [table[index].clone().requires_grad_() for table in tables]
    states = [net[:1](batch["input"]), net[1:3](variables[0])]
    total = (net[3:](variables[1]) - batch["target"]).square().sum(1).mean()
    for weight, variable, state, multiplier in zip(weights, variables, states, multipliers, strict=True):
        gap = variable - state
        total = total + weight * (beta * (gap * gap).sum() - (multiplier[index] * gap).sum())
    return total, variables, states


@pytest.mark.one_in(3)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("method", ["penalty", "lagrangian"])
def test_stored_variables_descend_one_joint_objective(method: str, reduction: str) -> None:
    """Three epochs of gradient descent on L in theta and lambda, and the multipliers' steps, by plain autograd."""
    beta, rate = 4.0, 0.02
    program = alone(auxiliary(method=method, reduction=reduction, lambda_lr=rate))
    net, stream, rows = copy.deepcopy(program.problems["net"].module), Stream(Rows(), 4, seed=1), Rows()
    tables: list[Tensor] = []
    multipliers = [torch.zeros(12, width, dtype=torch.float64) for width in (5, 4)]
    seen: set[int] = set()
    for tick in range(9):
        batch = stream.next()
        if tick < 3:
            assert seen.isdisjoint(batch["index"].tolist())
            seen.update(batch["index"].tolist())
            with torch.no_grad():
                serial = [net[:1](rows.input), net[:3](rows.input)]
            if not tables:
                tables = [torch.zeros_like(each) for each in serial]
            for table, each in zip(tables, serial, strict=True):
                table[batch["index"]] = each[batch["index"]]
        weights = [1.0, 1.0] if reduction == "sum" else [1 / (4 * 5), 1 / (4 * 4)]
        total, variables, states = joint(net, tables, multipliers, batch, beta, weights)
        theta = list(net.parameters())
        slopes = torch.autograd.grad(total, [*theta, *variables])
        with torch.no_grad():
            for parameter, slope in zip(theta, slopes, strict=False):
                parameter -= 0.05 * slope
            for each, state, slope, table, kappa in zip(
                variables, states, slopes[len(theta) :], tables, multipliers, strict=True
            ):
                table[batch["index"]] = each - rate * slope
                if method == "lagrangian":
                    kappa[batch["index"]] -= 2 * beta * (table[batch["index"]] - state)
    follow(program, 9)
    found = dict(program.problems["net"].module.named_parameters())
    torch.testing.assert_close(found, dict(net.named_parameters()), rtol=1e-12, atol=1e-13)
    state = program.problems["net"].parallel.state_dict()["stages"]
    for number, table in enumerate(tables, start=1):
        torch.testing.assert_close(state[str(number)]["variables"]["values"][:12], table, rtol=1e-12, atol=1e-13)


def assert_moved_alike(program: Any, net: nn.Module, aux: list[nn.Module]) -> None:
    """The stages and the networks have the parameters that plain autograd gives."""
    ours = dict(program.problems["net"].module.named_parameters())
    torch.testing.assert_close(ours, dict(net.named_parameters()), rtol=1e-12, atol=1e-13)
    stages = program.problems["net"].parallel.state_dict()["stages"]
    for number, network in enumerate(aux):
        expected = [parameter.detach() for parameter in network.parameters()]
        torch.testing.assert_close([*stages[str(number)]["network"].values()], expected, rtol=1e-12, atol=1e-13)


def descend(module: nn.Module, rate: float, slopes: Sequence[Tensor]) -> None:
    for parameter, slope in zip(module.parameters(), slopes, strict=False):
        parameter.data -= rate * slope


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_step_with_networks_by_plain_autograd(num_blocks: int) -> None:
    """lambda_{k+1} = AuxNet_k(lambda_k); one step of gradient descent on norm(lambda' - AuxNet)^2."""
    beta, rate, network_rate = 4.0, 0.02, 0.01
    program = alone(auxiliary(variables="auxnet", auxnet_lr=network_rate, auxnet_blocks=num_blocks))
    net, batch = copy.deepcopy(program.problems["net"].module), Stream(Rows(), 4, seed=1).next()
    # The second stage is 5 -> 5 -> 4: the layer that keeps the width is what thinning takes away.
    thin = net[1:3] if num_blocks else nn.Sequential(net[1][1], net[2])
    aux = [copy.deepcopy(net[:1]), copy.deepcopy(thin)]
    first = aux[0](batch["input"])
    second = aux[1](first.detach())
    zeros = [torch.zeros_like(first), torch.zeros_like(second)]
    batch = {**batch, "index": torch.arange(4)}
    total, variables, _ = joint(net, [first, second], zeros, batch, beta, [1.0, 1.0])
    count = len(list(net.parameters()))
    slopes = torch.autograd.grad(total, [*net.parameters(), *variables])
    descend(net, 0.05, slopes[:count])
    for network, proposed, variable, slope in zip(aux, (first, second), variables, slopes[count:], strict=True):
        loss = (variable.detach() - rate * slope - proposed).square().sum()
        descend(network, network_rate, torch.autograd.grad(loss, list(network.parameters())))
    follow(program, 1)
    assert_moved_alike(program, net, aux)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_chain_follows_the_gradient_of_one_objective(steps: int) -> None:
    """By plain autograd through all networks: of phi + beta sum norm(lambda_k - X^{k-1})^2, with lambda by networks."""
    beta, rate, network_rate = 4.0, 0.02, 0.01
    settings = {"auxnet_lr": network_rate, "auxnet_gradient": "chain", "distillation_steps": steps}
    program = alone(auxiliary(variables="auxnet", **settings))
    net, batch = copy.deepcopy(program.problems["net"].module), Stream(Rows(), 4, seed=1).next()
    aux = [copy.deepcopy(net[:1]), copy.deepcopy(net[1:3])]
    first = aux[0](batch["input"])
    second = aux[1](first)
    states = [net[:1](batch["input"]), net[1:3](first)]
    violation = (first - states[0]).square().sum() + (second - states[1]).square().sum()
    objective = squared_error(batch, model=lambda _: net[3:](second)) + beta * violation
    slopes = torch.autograd.grad(objective, [*net.parameters(), first, second], retain_graph=True)
    moves = [torch.autograd.grad(objective, list(network.parameters()), retain_graph=True) for network in aux]
    descend(net, 0.05, slopes[:-2])
    for network, before, proposed, slope, move in zip(
        aux, (batch["input"], first), (first, second), slopes[-2:], moves, strict=True
    ):
        target = (proposed - rate * slope).detach()
        descend(network, 2 * rate * network_rate, move)
        for _ in range(steps - 1):
            loss = (target - network(before.detach())).square().sum()
            descend(network, network_rate, torch.autograd.grad(loss, list(network.parameters())))
    follow(program, 1)
    assert_moved_alike(program, net, aux)


def test_a_gradient_of_several_batches_is_their_mean() -> None:
    """Two batches that have no sample in common, before any parameter moves."""
    once = alone(auxiliary(), stream=Stream(Rows(), 8, seed=1))
    halves = alone(auxiliary(), accumulate_batches=2)
    for program in (once, halves):
        follow(program, 1)
    torch.testing.assert_close(*map(parameters, (once, halves)), rtol=1e-12, atol=1e-13)


def test_one_distillation_step_is_equation_29() -> None:
    """xi <- xi - 2 eta_aux eta_lambda (dL/dlambda) dReAuxNet/dxi."""
    beta, rate, network_rate = 4.0, 0.02, 0.01
    parallel = auxiliary(variables="recursive", auxnet_lr=network_rate)
    program = alone(parallel)
    net, batch = copy.deepcopy(program.problems["net"].module), Stream(Rows(), 4, seed=1).next()
    aux = [copy.deepcopy(net[:1]), copy.deepcopy(net[:3])]
    given = [network(batch["input"]) for network in aux]
    zeros = [torch.zeros_like(each) for each in given]
    total, variables, _ = joint(net, given, zeros, {**batch, "index": torch.arange(4)}, beta, [1.0, 1.0])
    slopes = torch.autograd.grad(total, variables)
    follow(program, 1)
    for number, (network, found, slope) in enumerate(zip(aux, given, slopes, strict=True), start=1):
        moves = torch.autograd.grad(found, list(network.parameters()), slope)
        state = parallel.state_dict()["stages"][str(number)]["network"]
        for ours, start, move in zip(state.values(), network.parameters(), moves, strict=True):
            expected = start.detach() - 2 * network_rate * rate * move
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("product", ["finite_difference", "reverse"])
def test_its_hypergradients_are_those_of_the_serial_loss(product: str) -> None:
    """At the same parameters and batches the upper gradient is the plain program's, bit by bit."""
    algorithm = partial(Implicit, Identity(), product)
    ours, plain = reweighted(auxiliary(), hypergradient=algorithm()), reweighted(None, hypergradient=algorithm())
    follow(ours, 4)
    state = ours.state_dict()
    state["net"]["parallel"] = None
    plain.load_state_dict(state)
    for name in ("weigher", "net"):
        assert_identical(ours.gradient(name), plain.gradient(name))
    assert torch.equal(ours.loss("net").loss, plain.loss("net").loss)


def test_running_statistics_are_those_of_the_stages() -> None:
    """Without recalibration those of lambda; with it those of a serial pass, every second step here."""
    found = {}
    for every in (0, 2):
        module = stack(norm=True)
        program = alone(auxiliary(recalibrate=every, noise=1.0), module)
        follow(program, 1)
        found[every] = {name: buffer.clone() for name, buffer in module.named_buffers()}
        follow(program, 1)
        is_moved = module[1][1].num_batches_tracked.item() - found[every]["1.1.num_batches_tracked"].item()
        assert is_moved == (1 if every == 0 else 0)
    serial = stack(norm=True)
    for norm in (each for each in serial.modules() if isinstance(each, nn.BatchNorm1d)):
        # Nothing of the initial statistics is left after the first collection.
        norm.momentum = 1.0
    serial(Stream(Rows(), 4, seed=1).next()["input"])
    assert_identical(found[2], dict(serial.named_buffers()))
    assert not torch.equal(found[0]["1.1.running_mean"], found[2]["1.1.running_mean"])


class Augmented(Rows):
    """Three copies of each of four samples."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = dict(super().__getitem__(index))
        return {**sample, "index": torch.tensor(index % 4), "copy": torch.tensor(index // 4)}


def test_a_finite_number_of_copies_has_variables_each() -> None:
    """The same as so many different samples."""
    plain, copied = alone(auxiliary()), alone(auxiliary(copies=3), stream=Stream(Augmented(), 4, seed=1))
    for program in (plain, copied):
        follow(program, 7)
    assert_identical(*map(parameters, (plain, copied)))


def test_the_loss_may_use_parameters_beside_the_call() -> None:
    """A decay of all of them, on the first visit of samples and without penalty: as in one serial pass."""

    def decayed(batch: Any, *, model: Any) -> Tensor:
        return squared_error(batch, model=model) + 0.5 * sum(each.square().sum() for each in model.parameters())

    programs = [alone(auxiliary(), loss=decayed), alone(auxiliary(), optimizer=partial(sgd, weight_decay=1.0))]
    for program in programs:
        follow(program, 4)
    torch.testing.assert_close(*map(parameters, programs), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("kind", ["lagrangian", "auxnet"])
def test_in_mixed_precision_variables_stay_in_full(kind: str) -> None:
    # What moves less than bf16 resolves would not be seen.
    parallel = auxiliary(**{**KINDS[kind], "lambda_lr": None, "auxnet_lr": 0.1})
    samples = Rows()
    samples.input, samples.target = samples.input.float(), samples.target.float()
    program = alone(parallel, stack().float(), precision="bf16", stream=Stream(samples, 4, seed=1))
    statistics = follow(program, 4)[-1]
    assert 0 < statistics["net/violation_2"] < 10
    kept = filter(torch.is_tensor, tree_leaves(parallel.state_dict()["stages"]))
    assert {each.dtype for each in kept if each.is_floating_point()} == {torch.float32}


def pictures(augmentation: Any) -> InMemoryDataset:
    return InMemoryDataset(
        torch.zeros(8, 1, 1, 3), torch.zeros(8).long(), Normalization([0.5], [0.5]), augmentation=augmentation
    )


def twice(batch: Any, *, model: Any) -> Tensor:
    return (model(batch["input"]) + model(batch["input"])).square().mean()


@pytest.mark.parametrize(
    ("stages", "variables", "rates"),
    [(2, "stored", [1.0]), (4, "stored", [0.5, 0.5, 1.0]), (3, "auxnet", [1.0, 1.0]), (3, "recursive", [1.0, 1.0])],
)
def test_variables_between_penalties_take_smaller_steps(stages: int, variables: str, rates: list[float]) -> None:
    settings = Auxiliary(stages, variables=variables)
    assert [settings.rate(each) for each in range(1, stages)] == rates
    given = Auxiliary(stages, variables=variables, lambda_rate=0.3)
    assert given.rate(stages - 1) == 0.3
    # Half of the samples, in one of two parts: the step is that of the whole batch's weight; a part without any stays.
    shapes, cpu = [torch.Size([5])] * 3, torch.device("cpu")
    step = partial(StageStep, settings, 0, (torch.zeros(4, 2),), shapes, torch.float32, cpu)
    beta, weight = 10.0, 1.0 / (4 * 5)
    assert step(share=1.0, num_replicas=2).step_size(1) == pytest.approx(1 / (2 * beta * weight / 2), rel=1e-12)
    assert step(share=0.0, num_replicas=2).step_size(1) == 0.0


def test_noise_is_not_stored() -> None:
    """It moves the point at which slopes are taken; without any step, the stored values stay the serial ones."""
    parallel = auxiliary(noise=0.5, lambda_lr=1e-12)
    follow(alone(parallel), 1)
    batch, net = Stream(Rows(), 4, seed=1).next(), stack()
    kept = parallel.state_dict()["stages"]["1"]["variables"]["values"][batch["index"]]
    torch.testing.assert_close(kept, net[:1](batch["input"]).detach(), rtol=0, atol=1e-9)
    assert parallel.statistics()["violation_1"] > 0.5


def test_a_look_ahead_is_taken_back() -> None:
    """A snapshot from before the first step, and from after it."""
    program = alone(auxiliary())
    problem, schedule = program.problems["net"], Schedule(program)
    start = problem.snapshot()
    schedule.tick()
    then, parallel = problem.snapshot(), str(problem.parallel.state_dict())
    schedule.tick()
    assert str(problem.parallel.state_dict()) != parallel
    problem.restore(then)
    assert str(problem.parallel.state_dict()) == parallel
    problem.restore(start)
    assert problem.parallel.state_dict() == {"is_built": False}


def test_each_interface_may_have_its_own_penalty_and_rate() -> None:
    """Against the step by hand: linear stages, of which the middle one has penalties on both sides."""
    parallel = Auxiliary(stages=3, cut=["1", "2"], beta=[2.0, 5.0], lambda_rate=[0.2, 0.5], reduction="sum")
    net = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(2)], nn.Linear(3, 2, bias=False)).double()
    program = alone(parallel, net, stream=Stream(Rows(4), 4, shuffle=False), optimizer=partial(torch.optim.SGD, lr=0.0))
    schedule, rows = Schedule(program), Rows(4)
    schedule.tick()
    # The first visit begins at the serial states.
    one = rows.input @ net[0].weight.T
    two = (one @ net[1].weight.T).requires_grad_()
    onward = torch.autograd.grad((two @ net[2].weight.T - rows.target).square().sum(1).mean(), two)[0]
    moved = two - 0.5 / (2 * 5.0) * onward
    schedule.tick()
    stages = parallel.state_dict()["stages"]
    again = moved.detach().requires_grad_()
    onward = torch.autograd.grad((again @ net[2].weight.T - rows.target).square().sum(1).mean(), again)[0]
    expected_two = moved - 0.5 / (2 * 5.0) * (2 * 5.0 * (moved - two) + onward)
    back = 2 * 5.0 * (two - moved) @ net[1].weight
    expected_one = one - 0.2 / (2 * 2.0) * back
    for number, expected in ((1, expected_one), (2, expected_two)):
        torch.testing.assert_close(stages[str(number)]["variables"]["values"][:4], expected.detach())
    assert {"beta_1": 2.0, "beta_2": 5.0}.items() <= parallel.statistics().items()


@pytest.mark.parametrize("num_steps", [2, 60])
def test_several_steps_a_visit(num_steps: int) -> None:
    """They descend what is minimised: with many, lambda is its stationary point for the parameters at hand."""
    rate = 0.4
    parallel = Auxiliary(stages=2, cut=["1"], beta=3.0, lambda_rate=rate, lambda_steps=num_steps, reduction="sum")
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    program = alone(parallel, net, stream=Stream(Rows(4), 4, shuffle=False), optimizer=partial(torch.optim.SGD, lr=0.0))
    Schedule(program).tick()
    rows = Rows(4)
    state = net[0](rows.input).detach()
    point = state.clone()
    for _ in range(num_steps):
        leaf = point.requires_grad_()
        value = 3.0 * (leaf - state).square().sum() + (net[1](leaf) - rows.target).square().sum(1).mean()
        point = point.detach() - rate / 6.0 * torch.autograd.grad(value, leaf)[0]
    torch.testing.assert_close(parallel.state_dict()["stages"]["1"]["variables"]["values"][:4], point)
    if num_steps == 60:
        leaf = point.requires_grad_()
        value = 3.0 * (leaf - state).square().sum() + (net[1](leaf) - rows.target).square().sum(1).mean()
        assert torch.autograd.grad(value, leaf)[0].abs().max() < 1e-9


def test_a_rate_that_follows_the_curvature_is_stable_where_whole_steps_are_not() -> None:
    """A middle stage of Jacobian 4: the step of lambda is stable below 2 / (1 + 16)."""

    def program(rate: Any) -> Program:
        net = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(3)]).double()
        with torch.no_grad():
            for layer, size in zip(net, (1.0, 4.0, 1.0), strict=True):
                layer.weight.copy_(size * torch.eye(3))
        parallel = Auxiliary(stages=3, cut=["1", "2"], beta=1.0, lambda_rate=[rate, 0.1], reduction="sum")
        settings: dict[str, Any] = {"loss": small_sum, "optimizer": partial(torch.optim.SGD, lr=0.0)}
        return alone(parallel, net, stream=Stream(Rows(4), 4, shuffle=False), **settings)

    statistics = follow(program("auto"), 30)[-1]
    assert statistics["net/curvature_1"] == pytest.approx(16.0, rel=1e-6)
    assert statistics["net/violation_1"] < 10.0
    with pytest.warns(UserWarning, match="times the states"), pytest.raises(RunError, match="the stages diverge"):
        follow(program(1.0), 30)


def small_sum(batch: Any, *, model: Any) -> Tensor:
    return model(batch["input"]).sum()


SEVERAL = {"lambda_steps": 3, "lambda_lr": None, "lambda_rate": "auto"}
RESUMED = {
    **KINDS,
    **{f"{kind}, several steps": {**KINDS[kind], **SEVERAL} for kind in ("lagrangian", "auxnet", "recursive")},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", RESUMED)
def test_a_resumed_run_is_the_same_bit_by_bit(kind: str) -> None:
    whole, second = (alone(auxiliary(noise=0.1, **RESUMED[kind]), stack(norm=True)) for _ in range(2))
    follow(whole, 4)
    second.load_state_dict(copy.deepcopy(whole.state_dict()))
    assert second.problems["net"].parallel.state_dict()["num_steps"] == 4
    for program in (whole, second):
        follow(program, 1)
    assert_identical(whole.problems["net"].module.state_dict(), second.problems["net"].module.state_dict())
    assert str(whole.state_dict()["net"]["parallel"]) == str(second.state_dict()["net"]["parallel"])
    assert ("curvature_1" in second.problems["net"].parallel.statistics()) == ("several" in kind)


def test_diverging_stages_say_what_to_lower() -> None:
    parted = pytest.warns(UserWarning, match=r"at interface 1 the violation is .* times the states")
    with (
        parted,
        pytest.raises(RunError, match=r"interface \d became .* with beta=1e\+06.*Lower problems\.net\.parallel"),
    ):
        follow(alone(auxiliary(beta=1e6)), 200)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: auxiliary(method="lagrangian", variables="auxnet"), "expected penalty with variables=auxnet"),
        (lambda: alone(auxiliary(), loss=twice), r"calls its module a second time"),
        (lambda: alone(auxiliary(copies=2)), r"the batch's 'copy': found None"),
        (lambda: alone(auxiliary(), stream=Stream(pictures(CropAndFlip(1)), 4)), r"with random augmentation"),
        (lambda: alone(auxiliary(variables="auxnet", auxnet=stack(widths=(5, 5)))), r"no place for interface 1 of 2"),
        (
            lambda: reweighted(auxiliary(), hypergradient=SABA(0.1)),
            r"hypergradient: found parallel with hypergradient that makes the steps",
        ),
    ],
)
def test_what_it_cannot_do(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        follow(make(), 1)
