"""A path of a shared space is the model of its decisions; what the space keeps of its training."""

import copy
import pickle
import random
from functools import partial

import pytest
import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.hypergradient import Identity, Implicit
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.spaces import FairPaths, Mixture, Operator, SharedSpace, Space, UniformPaths
from tests.spaces.shared.mixtures import NUM_STEPS, program, start
from tests.spaces.shared.networks import SPACES, Net, depth, kernel
from tests.spaces.shared.test_against_models import cross_entropy, samples


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


@pytest.mark.parametrize("product", ["reverse", "forward", "finite_difference"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
def test_live_steps_alone_are_counted(product):
    made = program(Implicit(Identity(0.1), product), start()[1], lower_steps=NUM_STEPS)
    schedule = Schedule(made)
    for _ in range(NUM_STEPS):
        schedule.tick()
    made.gradient("paths")
    counts = made.problems["model"].module.path_counts
    assert counts == {
        "activation_0": dict.fromkeys(["relu", "tanh", "same"], NUM_STEPS),
        "head_0": dict.fromkeys(["bias", "plain"], NUM_STEPS),
    }


def double_net():
    return Net().double()


KERNELS = partial(nn.Conv2d, kernel_size=5, dtype=torch.float64)


def double_kernel():
    return Operator("kernel", {"path": "*.conv"}, {"k3": None, "k5": KERNELS})


def of_paths(**settings):
    torch.manual_seed(1)
    given = [{"shape": [1, 6, 6], "dtype": "float64"}]
    return SharedSpace(double_net, [double_kernel()], inputs=given, seed=3, **settings)


def test_statistics_of_a_path_are_those_of_a_model_trained_alone_on_its_mini_batches():
    """The weights are shared, and go from model to model; the statistics of each model stay its own."""
    space, rows = of_paths(paths=UniformPaths(), statistics="path"), samples(64, 3)
    drawn = []
    space.paths.register_forward_hook(lambda module, inputs, path: drawn.append(dict(path)))
    stream, optimizer = Stream(rows, 8, seed=0), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    how = {"roles": {"model": "net"}, "stream": Stream(rows, 8, seed=0), "optimizer": optimizer}
    problem = Problem("net", space, cross_entropy, **how)
    schedule = Schedule(Program([problem], Graph()))
    given = [{"shape": [1, 6, 6], "dtype": "float64"}]
    statistics = {}
    for _ in range(8):
        weights = copy.deepcopy(space.state_dict())
        schedule.tick()
        path, batch = drawn[-1], stream.next()
        model = Space(double_net, [double_kernel()], inputs=given, seed=3, decisions=path)
        # The shared weights before the step, and this model's own statistics.
        now = {key: each.clone() for key, each in of_state(space, weights, path).items()}
        key = tuple(path.values())
        model.load_state_dict({**now, **statistics.get(key, fresh(model))})
        model.train()(batch["input"])
        statistics[key] = {name: each.clone() for name, each in model.state_dict().items() if name.endswith(RUNNING)}
    assert len(statistics) > 3
    for key, expected in statistics.items():
        path = dict(zip(["kernel_0", "kernel_1", "kernel_2"], key, strict=True))
        found = space.state_of(path)
        for name, each in expected.items():
            torch.testing.assert_close(found[name], each, rtol=0, atol=1e-12)
        model = Space(double_net, [double_kernel()], inputs=given, seed=3, decisions=path)
        model.load_state_dict(found)
        x = rows.values["input"][:8]
        assert torch.equal(model.eval()(x), space.eval()(x, path=path))


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
