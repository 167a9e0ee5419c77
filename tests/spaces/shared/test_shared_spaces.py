"""A path of a shared space is the model of its decisions; what the space keeps of its training."""

import copy
import pickle
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import spaces
from mlotool.core.errors import ConfigError
from mlotool.data.splits import InMemoryTensors
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.spaces import Branch, FairPaths, Insert, Mixture, Operator, Repeat, SharedSpace, Space, UniformPaths
from tests.runner.tiny import upper_loss as cross_entropy
from tests.spaces.shared.test_ranks import Given

POINTWISE = partial(nn.Conv2d, kernel_size=1)
WIDE = partial(nn.Conv2d, kernel_size=3, padding=1)
FIVE = partial(nn.Conv2d, kernel_size=5)
BLOCKS = {"type": "Block"}
IMAGES = [{"shape": [1, 6, 6], "dtype": "float64"}]


class Block(nn.Module):
    """A convolution with a normalization and a way around both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x))) + x


class Net(nn.Module):
    """Three blocks at two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.first, self.second = Block(4), Block(4)
        self.down = nn.Conv2d(4, 8, 3, 2, 1)
        self.third = Block(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.second(self.first(self.stem(x))))
        return self.head(self.third(x).mean((2, 3)))


def kernel(**settings):
    where = {"type": "Conv2d", "where": spaces.KeepsShape()}
    return Operator("kernel", where, {"k3": None, "k5": FIVE}, **settings)


def depth(counts=(1, 0, 3)):
    return Repeat("depth", BLOCKS, counts)


def cell(**settings):
    candidates = {"c1": POINTWISE, "c3": WIDE, "same": None}
    return spaces.Cell("cell", BLOCKS, candidates, num_nodes=2, ends="all", **settings)


def grow(steps):
    mutators = {"none": None, "behind": partial(Insert, candidates={"tanh": nn.Tanh, "conv": POINTWISE})}
    return spaces.Grow("grow", {"type": "Conv2d"}, mutators, steps=steps)


SPACES = {
    "kernels": lambda: [kernel()],
    "tied_kernels": lambda: [kernel(tied=True)],
    "depths": lambda: [depth()],
    "branches": lambda: [Branch("branch", BLOCKS, {"none": None, "c1": POINTWISE, "c3": WIDE})],
    "projected": lambda: [Branch("branch", "second", {"none": None, "c3": WIDE}, "concat", POINTWISE)],
    "inserted": lambda: [Insert("norm", {"type": "Conv2d"}, {"none": None, "norm": nn.BatchNorm2d, "tanh": nn.Tanh})],
    "inputs": lambda: [spaces.Input("skip", "second", {"type": "Conv2d"}, most=4)],
    "splits": lambda: [spaces.Split("split", BLOCKS, {"none": None, "tanh": nn.Tanh, "c1": POINTWISE})],
    "cells": lambda: [cell(project=POINTWISE)],
    "tied_cells": lambda: [cell(end="sum", tied=True)],
    "blocks": lambda: [Operator("block", BLOCKS, {"block": None, "skip": nn.Identity, "c3": WIDE})],
    "kernels_in_depths": lambda: [kernel(), depth()],
    "all": lambda: [kernel(tied=True), depth((1, 2)), Branch("beside", "first", {"none": None, "c1": POINTWISE})],
    "kernels_in_blocks": lambda: [kernel(), Operator("block", BLOCKS, {"block": None, "skip": nn.Identity})],
    "grown": lambda: [grow(1)],
}


def shared(mutators, **settings):
    torch.manual_seed(1)
    return SharedSpace(Net, mutators, inputs=[1, 6, 6], seed=3, **settings)


def single(mutators, path):
    torch.manual_seed(1)
    return Space(Net, mutators, inputs=[1, 6, 6], seed=3, decisions=path)


def some_path(space, number):
    generator = random.Random(number)
    path = {}
    for each in space.table:
        if each.is_asked(path):
            path[each.name] = generator.choice(each.candidates)
    return path


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SPACES)
def test_a_path_is_the_model_of_its_decisions(name):
    space = shared(SPACES[name](), paths=UniformPaths())
    start = copy.deepcopy(space.state_dict())
    for number in range(2):
        path = some_path(space, number)
        model, x = single(SPACES[name](), path), torch.randn(4, 1, 6, 6)
        assert {key: each.value for key, each in model.decisions.items()} == path
        own, mine = model.state_dict(), space.state_of(path)
        assert own.keys() == mine.keys()
        assert all(torch.equal(own[key], mine[key]) for key in own)
        assert torch.equal(model.eval()(x), space.eval()(x, path=path))
        assert torch.equal(model.train()(x), space.train()(x, path=path))
        assert all(torch.equal(own[key], mine[key]) for key in own)
        space.load_state_dict(start)


def test_without_paths_it_is_the_model_of_its_decisions():
    x = torch.randn(4, 1, 6, 6)
    path = {"kernel_0": "k5", "depth_2": 3}
    space = shared([kernel(), depth()], decisions=path)
    assert torch.equal(space(x), single([kernel(), depth()], path)(x))
    with pytest.raises(ConfigError, match="no model asks for a decision of this name"):
        shared([kernel()], decisions={"kernle_0": "k5"})


@pytest.mark.parametrize("kind", [UniformPaths, FairPaths])
def test_draws_come_from_the_default_generator_and_go_on_from_a_state(kind):
    space, x = shared([kernel(), depth()], paths=kind()), torch.randn(2, 1, 6, 6)
    torch.manual_seed(5)
    for _ in range(3):
        space(x)
    state, random_state = copy.deepcopy(space.state_dict()), torch.get_rng_state()
    first = [space(x) for _ in range(4)]
    space.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert all(torch.equal(one, space(x)) for one in first)


def test_fair_paths_take_each_candidate_equally_often():
    space = shared([kernel(), depth()], paths=FairPaths())
    drawn = [space.paths(space.table) for _ in range(6)]
    assert sorted(each["depth_0"] for each in drawn) == [0, 0, 1, 1, 3, 3]
    assert sorted(each["kernel_1"] for each in drawn) == ["k3"] * 3 + ["k5"] * 3
    before = space.paths.left.clone()
    space.eval()(torch.randn(2, 1, 6, 6))
    assert torch.equal(space.paths.left, before)


def test_its_nodes_are_told_apart_and_say_which_candidates_they_are():
    space = SharedSpace(Net, [kernel()], inputs=[1, 6, 6], seed=3)
    ids = [each.id for each in space.nodes]
    assert len(set(ids)) == len(ids)
    candidates = {one: each.id for each in space.nodes for one in each.stands_for}
    assert set(candidates) == {(f"kernel_{number}", value) for number in range(3) for value in ("k3", "k5")}
    assert all(candidates[name, "k5"] == f"{candidates[name, 'k3']}@k5" for name, _ in candidates)
    choices = [each for each in space.nodes if each.kind == "choice"]
    assert [set(each.inputs) for each in choices] == [
        {candidates[f"kernel_{number}", value] for value in ("k3", "k5")} for number in range(3)
    ]


PATH = {"kernel_0": "k3", "kernel_1": "k5", "kernel_2": "k3"}


def test_training_calls_are_counted_by_candidate():
    space, x = shared([kernel()]), torch.randn(2, 1, 6, 6)
    for _ in range(3):
        space(x, path=PATH)
    space(x, path={**PATH, "kernel_0": torch.tensor([0.5, 0.5])})
    space.eval()(x, path=PATH)
    assert space.path_counts == {
        "kernel_0": {"k3": 4, "k5": 1},
        "kernel_1": {"k3": 0, "k5": 4},
        "kernel_2": {"k3": 4, "k5": 0},
    }


def test_what_a_path_does_not_ask_for_is_not_counted():
    space = shared([kernel(tied=True), depth((1, 0))])
    for last in (1, 0):
        path = {"kernel": "k5", "depth_0": 0, "depth_1": last, "depth_2": 0}
        space(torch.randn(2, 1, 6, 6), path=path)
        assert space.path_counts["kernel"] == {"k3": 0, "k5": 1}


def test_counts_are_kept_by_states_and_copies():
    space, x = shared([kernel()], paths=UniformPaths()), torch.randn(2, 1, 6, 6)
    for _ in range(5):
        space(x)
    other = shared([kernel()], paths=UniformPaths())
    other.load_state_dict(space.state_dict())
    for each in (other, copy.deepcopy(space), pickle.loads(pickle.dumps(space))):
        assert each.path_counts == space.path_counts
        each(x)
        assert sum(each.path_counts["kernel_0"].values()) == 6
    assert "counts" not in space.state_of(PATH)


def double_net():
    return Net().double()


def double_kernel():
    return Operator("kernel", {"path": "*.conv"}, {"k3": None, "k5": FIVE})


def of_paths(**settings):
    torch.manual_seed(1)
    return SharedSpace(double_net, [double_kernel()], inputs=IMAGES, seed=3, **settings)


def test_statistics_of_a_path_are_those_of_a_model_trained_alone_on_its_mini_batches():
    """The weights are shared, and go from model to model; the statistics of each model stay its own."""
    space, rows = of_paths(paths=UniformPaths(), statistics="path"), samples(64, 3)
    drawn = []
    space.paths.register_forward_hook(lambda module, inputs, path: drawn.append(dict(path)))
    stream, optimizer = Stream(rows, 8, seed=0), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    how = {"roles": {"model": "net"}, "stream": Stream(rows, 8, seed=0), "optimizer": optimizer}
    problem = Problem("net", space, cross_entropy, **how)
    schedule = Schedule(Program([problem], Graph()))
    models, statistics = {}, {}
    for _ in range(8):
        weights = copy.deepcopy(space.state_dict())
        schedule.tick()
        path, batch = drawn[-1], stream.next()
        key = tuple(path.values())
        if key not in models:
            models[key] = Space(double_net, [double_kernel()], inputs=IMAGES, seed=3, decisions=path)
        model = models[key]
        # The shared weights before the step, and this model's own statistics.
        now = {key: each.clone() for key, each in of_state(space, weights, path).items()}
        model.load_state_dict({**now, **statistics.get(key, fresh(model))})
        model.train()(batch["input"])
        statistics[key] = {name: each.clone() for name, each in model.state_dict().items() if name.endswith(RUNNING)}
    assert len(statistics) > 3
    for key, expected in statistics.items():
        path = dict(zip(["kernel_0", "kernel_1", "kernel_2"], key, strict=True))
        found = space.state_of(path)
        for name, each in expected.items():
            torch.testing.assert_close(found[name], each, rtol=0, atol=1e-12)
        models[key].load_state_dict(found)
        x = rows.values["input"][:8]
        assert torch.equal(models[key].eval()(x), space.eval()(x, path=path))


def test_statistics_of_paths_are_saved_and_are_left_by_mixtures_evaluation_and_gradients():
    space, rows = of_paths(statistics="path"), samples(8, 3)
    x = rows.values["input"]
    space(x, path=PATH)
    before = {name: each.clone() for name, each in space.state_of(PATH).items()}
    assert before["first.norm.num_batches_tracked"] == 1
    space(x, path={**PATH, "kernel_0": torch.tensor([0.5, 0.5])})
    space.eval()(x, path=PATH)
    loss = lambda batch, *, model: cross_entropy(batch, model=partial(model, path=PATH))  # noqa: E731
    problem = Problem("net", space.train(), loss, roles={"model": "net"}, stream=Stream(rows, 8, seed=0))
    Program([problem], Graph()).gradient("net")
    other = of_paths(statistics="path")
    other.load_state_dict(space.state_dict())
    for each in (space, other, copy.deepcopy(space)):
        assert all(torch.equal(value, before[name]) for name, value in each.state_of(PATH).items())
    assert space.state_of({**PATH, "kernel_0": "k5"})["first.norm.num_batches_tracked"] == 0


RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def fresh(model):
    return {name: each.clone() for name, each in model.state_dict().items() if name.endswith(RUNNING)}


def of_state(space, state, path):
    other = copy.deepcopy(space)
    other.load_state_dict(state)
    return other.state_of(path)


class Root(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()

    def forward(self, x):
        return x.sqrt()


def test_the_first_path_whose_result_is_not_finite_is_named():
    activation = Operator("activation", {"type": "ReLU"}, {"relu": None, "root": Root})
    torch.manual_seed(0)
    base = partial(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU()))
    space, x = SharedSpace(base, [activation], inputs=[3]), torch.randn(8, 3)
    gates = Mixture(("relu", "root"), torch.tensor([1.0, 0.0]))
    space(x, path={"activation_0": "root", "activation_1": gates})
    space(x, path={"activation_0": "root", "activation_1": "relu"})
    assert space.unsound == (
        "On the path activation_0: root, activation_1: relu + root the result was the first that is not finite."
    )


NUM_BATCHES, SIZES = 20, {"k1": 1, "k3": 3, "k5": 5}


def base(sizes: tuple[int, ...] = (1, 1, 1)) -> nn.Sequential:
    # No bias before a BatchNorm: its gradient is rounding alone, of which Adam makes steps.
    layers: list[nn.Module] = [nn.Conv2d(1, 6, 3, padding=1)]
    for size in sizes:
        layers += [nn.Conv2d(6, 6, size, padding=size // 2, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * 36, 4)).double()


def samples(count: int, num_classes: int = 4) -> InMemoryTensors:
    """Return images of noise."""
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    return InMemoryTensors({"input": images, "target": torch.randint(num_classes, (count,), generator=generator)})


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-3), partial(torch.optim.Adam, lr=1e-2)],
)
def test_twenty_mini_batches_are_those_of_models_alone(optimizer: Any) -> None:
    draw, rows = random.Random(0), samples(NUM_BATCHES * 8)
    paths = [tuple(draw.choice([*SIZES]) for _ in range(3)) for _ in range(NUM_BATCHES)]
    candidates = {
        name: partial(nn.Conv2d, kernel_size=size, padding=size // 2) if size > 1 else None
        for name, size in SIZES.items()
    }
    at = {"path": "*", "type": "Conv2d", "where": lambda place: place.id != "0"}
    torch.manual_seed(0)
    space = SharedSpace(base, [Operator("kernel", at, candidates)], inputs=IMAGES, seed=1, paths=Given(paths))
    weights = {name: each.clone() for name, each in space.state_dict().items() if name[0].isdigit()}
    how: dict[str, Any] = {"stream": Stream(rows, 8, seed=0), "optimizer": optimizer}
    schedule = Schedule(Program([Problem("net", space, cross_entropy, roles={"model": "net"}, **how)], Graph()))
    stream, states = Stream(rows, 8, seed=0), dict[str, Any]()
    for path in paths:
        schedule.tick()
        model, kernels = base(tuple(SIZES[name] for name in path)), dict(zip(("1", "4", "7"), path, strict=True))
        # Where a shared space keeps what the model has.
        places = {}
        for name in model.state_dict():
            layer, _, rest = name.partition(".")
            kernel = kernels.get(layer, "k1")
            places[name] = name if kernel == "k1" else f"{layer}@{kernel}.{rest}"
        model.load_state_dict({name: weights[place] for name, place in places.items()})
        step = optimizer(model.parameters())
        for name, parameter in model.named_parameters():
            step.state[parameter] = states.setdefault(places[name], {})
        cross_entropy(stream.next(), model=model).backward()
        step.step()
        weights |= {places[name]: each.clone() for name, each in model.state_dict().items()}
        states |= {places[name]: step.state[parameter] for name, parameter in model.named_parameters()}
    for name, each in weights.items():
        torch.testing.assert_close(space.state_dict()[name], each, rtol=0, atol=1e-12)
