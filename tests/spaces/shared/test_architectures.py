"""Gradients of what decides between candidates, against closed forms, enumeration and finite differences."""

import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from mlotool.losses.paths import score_function
from mlotool.spaces import BinaryPaths, Mixture, Operator, PathPolicy, SharedSpace

ACTIVATIONS = {"relu": None, "tanh": nn.Tanh, "same": nn.Identity}


def base():
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2)).double()


def make(candidates=ACTIVATIONS):
    activation = Operator("activation", {"type": "ReLU"}, candidates)
    torch.manual_seed(0)
    return SharedSpace(base, [activation], inputs=[{"shape": [4], "dtype": "float64"}])


def random_logits(architecture):
    torch.manual_seed(2)
    for each in architecture.logits.values():
        each.data = torch.randn_like(each, dtype=torch.float64)
    return architecture


def test_the_gradient_of_binary_gates_is_that_of_proxylessnas():
    space, x = make(), torch.randn(6, 4, dtype=torch.float64)
    paths = random_logits(BinaryPaths(make))
    torch.manual_seed(3)
    drawn = paths()
    assert all(sorted(each.weights.tolist()) == [0.0, 1.0] for each in drawn.values())
    gates = {name: each.weights.detach().clone().requires_grad_() for name, each in drawn.items()}
    path = {name: Mixture(each.candidates, gates[name], each.taken) for name, each in drawn.items()}
    space(x, path=path).square().mean().backward()
    torch.manual_seed(3)
    found = torch.autograd.grad(space(x, path=paths()).square().mean(), list(paths.logits.values()))
    for (name, mixture), gradient in zip(drawn.items(), found, strict=True):
        candidates = list(ACTIVATIONS)
        two = [candidates.index(each) for each in mixture.candidates]
        p = paths.logits[name].detach()[two].softmax(0)
        expected = torch.zeros(3, dtype=torch.float64)
        # Equation 4: dL/dalpha_i = sum_j dL/dg_j p_j (delta_ij - p_i).
        for i, j in itertools.product(range(2), repeat=2):
            expected[two[i]] += gates[name].grad[j] * p[j] * (float(i == j) - p[i])
        assert torch.allclose(gradient, expected, atol=1e-14)


def test_binary_gates_give_gradients_to_the_parameters_of_one_path_alone():
    candidates = {"small": None, "wide": partial(nn.Linear, 5, 5, dtype=torch.float64)}

    def space():
        torch.manual_seed(0)
        return SharedSpace(base, [Operator("layer", "2", candidates)], inputs=[{"shape": [4], "dtype": "float64"}])

    network, paths = space(), BinaryPaths(space)
    x = torch.randn(6, 4, dtype=torch.float64)
    drawn = paths()["layer_0"]
    network(x, path={"layer_0": drawn}).sum().backward()
    inside = {"small": network.get_submodule("2"), "wide": network.get_submodule("2@wide")}
    other = next(each for each in candidates if each != drawn.taken)
    assert inside[drawn.taken].weight.grad is not None
    assert inside[other].weight.grad is None
    assert paths.logits["layer_0"].grad.abs().min() > 0
    # The architecture a constant: one path alone is computed.
    called = []
    inside[other].register_forward_hook(lambda *_: called.append(other))
    network(x, path={"layer_0": drawn._replace(weights=drawn.weights.detach())})
    assert not called


def eight_paths():
    """A space of 8 paths: three decisions between two candidates."""

    def base():
        return nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(3, 3), nn.ReLU())])

    torch.manual_seed(0)
    activation = Operator("activation", {"type": "ReLU"}, {"relu": None, "tanh": nn.Tanh})
    return SharedSpace(lambda: base().double(), [activation], inputs=[{"shape": [3], "dtype": "float64"}])


def test_the_policys_gradient_is_that_of_the_enumerated_expectation():
    space, policy = eight_paths(), random_logits(PathPolicy(eight_paths))
    x = torch.randn(5, 3, dtype=torch.float64)
    logits = list(policy.logits.values())
    losses, log_probabilities = [], []
    for values in itertools.product(*(each.candidates for each in space.table)):
        path = {each.name: value for each, value in zip(space.table, values, strict=True)}
        losses.append(space(x, path=path).square().mean())
        places = [each.candidates.index(path[each.name]) for each in space.table]
        terms = [F.log_softmax(policy.logits[name], 0)[place] for name, place in zip(path, places, strict=True)]
        log_probabilities.append(torch.stack(terms).sum())
    losses, log_probabilities = torch.stack(losses), torch.stack(log_probabilities)
    expectation = (log_probabilities.exp() * losses).sum()
    expected = torch.cat(torch.autograd.grad(expectation, logits, retain_graph=True))
    # All pairs of paths, each by its probability: the estimate's expectation with two draws, without noise.
    found = 0.0
    for pair in itertools.product(range(8), repeat=2):
        estimate = score_function(losses[list(pair)], log_probabilities[list(pair)])
        weight = log_probabilities[list(pair)].sum().detach().exp()
        found = found + weight * torch.cat(torch.autograd.grad(estimate, logits, retain_graph=True))
    assert torch.allclose(found, expected, rtol=1e-10)


def test_draws_of_the_policy_have_its_probabilities():
    policy, counts = random_logits(PathPolicy(eight_paths)), {}
    torch.manual_seed(0)
    for _ in range(1000):
        path, log_probability = policy()
        counts.setdefault(tuple(path.values()), [0, log_probability.exp().item()])[0] += 1
    for count, probability in counts.values():
        assert abs(count / 1000 - probability) < 5 * math.sqrt(probability * (1 - probability) / 1000)
