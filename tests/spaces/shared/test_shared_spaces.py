"""A path of a shared space is the model that a space makes of the same decisions."""

import copy
import pickle
import random

import pytest
import torch

from mlotool.core.errors import ConfigError
from mlotool.spaces import FairPaths, SharedSpace, Space, UniformPaths
from tests.spaces.shared.networks import SPACES, Net, depth, kernel


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


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_compute_with_their_own_parameters(copied):
    space, x = shared([kernel(), depth()], paths=FairPaths()).eval(), torch.randn(2, 1, 6, 6)
    other, path = copied(space), some_path(space, 0)
    assert torch.equal(space(x, path=path), other(x, path=path))
    with torch.no_grad():
        other.stem.weight += 1
    assert not torch.equal(space(x, path=path), other(x, path=path))


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
