"""Closed forms of the derivative of optimizer steps against autograd of the pure steps."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW

from mlotool.problem.optimizers.adam import ADAM_RULE
from mlotool.problem.optimizers.optimizer_step import clipped
from mlotool.problem.optimizers.registry import RULES
from mlotool.problem.optimizers.rule import AlikeSteps, OptimizerRule, State, StepArguments, StepCotangents, pull_back
from mlotool.problem.optimizers.sgd import SGD_RULE

SHAPES = ((3, 2), (4,), ())
SGD_SETTINGS = [
    {"lr": 0.3, "momentum": m, "dampening": d, "nesterov": n, "weight_decay": w, "maximize": x}
    for m, d, n, w, x in itertools.product((0.0, 0.9), (0.0, 0.4), (False, True), (0.0, 0.1), (False, True))
    if not n or (m > 0 and d == 0)
]
ADAM_SETTINGS = [
    {"lr": 0.3, "betas": b, "eps": e, "weight_decay": w, "amsgrad": a, "maximize": x, "decoupled_weight_decay": d}
    for d, b, e, w, a, x in itertools.product(
        (False, True), ((0.9, 0.99), (0.0, 0.5)), (1e-8, 0.1), (0.0, 0.1), (False, True), (False, True)
    )
]


def vectors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]


def state_of(rule: OptimizerRule, settings: Mapping[str, Any], number: int, seed: int) -> list[dict[str, Tensor]]:
    """Return a state after `number` steps."""
    if number == 0:
        return [{} for _ in SHAPES]
    if rule is SGD_RULE:
        return [{"momentum_buffer": each} if settings["momentum"] else {} for each in vectors(seed)]
    found = []
    for first, second, largest in zip(vectors(seed), vectors(seed + 1), vectors(seed + 2), strict=True):
        state = {"step": torch.tensor(float(number)), "exp_avg": first, "exp_avg_sq": second.square()}
        found.append(state | ({"max_exp_avg_sq": largest.square()} if settings["amsgrad"] else {}))
    return found


def by_autograd(
    step: StepArguments, cotangent: Sequence[Tensor], of_state: Sequence[Mapping[str, Tensor]]
) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
    theta = [each.clone().requires_grad_() for each in step.theta]
    gradient = [None if each is None else each.clone().requires_grad_() for each in step.gradient]
    state = [{key: x if key == "step" else x.clone().requires_grad_() for key, x in s.items()} for s in step.state]
    slopes = gradient if step.clip is None else step.clip(gradient)[0]
    total = torch.zeros((), dtype=torch.float64)
    for number, (point, slope, old, each) in enumerate(zip(theta, slopes, state, step.hyperparameters, strict=True)):
        after: tuple[Tensor, State] = (point, old) if slope is None else step.rule.update(point, slope, old, each)
        total = total + (after[0] * cotangent[number]).sum()
        for key, value in of_state[number].items():
            total = total + (after[1][key] * value).sum()
    held = [value for each in state for key, value in each.items() if key != "step"]
    slots = [each for each in gradient if each is not None]
    found = iter(torch.autograd.grad(total, [*theta, *slots, *held], allow_unused=True, materialize_grads=True))
    return (
        [next(found) for _ in theta],
        [next(found) for _ in slots],
        [{key: next(found) for key in each if key != "step"} for each in state],
    )


def check(step: StepArguments, cotangent: Sequence[Tensor], of_state: list[dict[str, Tensor]]) -> None:
    theta, gradient, state = by_autograd(step, cotangent, of_state)
    found = pull_back(step, [*cotangent], of_state)
    torch.testing.assert_close(found.theta, theta, rtol=1e-12, atol=1e-12)
    slopes = [found.factor * x for x in found.gradient if x is not None]
    torch.testing.assert_close(slopes, gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.state, state, rtol=1e-12, atol=1e-12)


def of_new_state(step: StepArguments) -> list[dict[str, Tensor]]:
    """Return a cotangent for all that the step keeps."""
    found = []
    for number, (point, slope, old) in enumerate(zip(step.theta, step.gradient, step.state, strict=True)):
        new = old if slope is None else step.rule.update(point, slope, old, step.hyperparameters[number])[1]
        keys = [key for key in new if key != "step"]
        found.append({key: vectors(40 + index)[number] for index, key in enumerate(keys)})
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("number", [0, 1, 7])
@pytest.mark.parametrize(
    ("rule", "settings"), [(SGD_RULE, each) for each in SGD_SETTINGS] + [(ADAM_RULE, each) for each in ADAM_SETTINGS]
)
def test_every_setting(
    monkeypatch: pytest.MonkeyPatch, rule: OptimizerRule, settings: dict[str, Any], number: int
) -> None:
    monkeypatch.setattr("mlotool.problem.optimizers.rule._by_autograd", None)
    step = StepArguments(rule, vectors(0), vectors(10), state_of(rule, settings, number, 20), [settings] * 3)
    check(step, vectors(30), [{} for _ in SHAPES])
    check(step, vectors(30), of_new_state(step))


@pytest.mark.parametrize("most_chunks", [1, 2, 16])
@pytest.mark.parametrize(("rule", "settings"), [(SGD_RULE, SGD_SETTINGS[-1]), (ADAM_RULE, ADAM_SETTINGS[2])])
def test_a_large_model_is_taken_in_parts(
    monkeypatch: pytest.MonkeyPatch, rule: OptimizerRule, settings: dict[str, Any], most_chunks: int
) -> None:
    taken: list[int] = []

    def counted(steps: AlikeSteps) -> StepCotangents:
        taken.append(len(steps.theta))
        assert rule.derivative is not None
        return rule.derivative(steps)

    monkeypatch.setattr("mlotool.problem.optimizers.rule.SMALLEST_CHUNK", 1)
    monkeypatch.setattr("mlotool.problem.optimizers.rule.MOST_CHUNKS", most_chunks)
    state, rule_of_test = state_of(rule, settings, 3, 20), replace(rule, derivative=counted)
    step = StepArguments(rule_of_test, vectors(0), vectors(10), state, [settings] * 3)
    check(step, vectors(30), of_new_state(step))
    assert len(taken) == {1: 1, 2: 2, 16: 3}[most_chunks]


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("is_decoupled", [False, True])
def test_zero_gradients_and_second_moments(is_decoupled: bool, amsgrad: bool, number: int) -> None:
    rule, settings = ADAM_RULE, {**ADAM_SETTINGS[0], "amsgrad": amsgrad, "decoupled_weight_decay": is_decoupled}
    gradient, state = vectors(10), state_of(rule, settings, number, 20)
    gradient[0].zero_()
    gradient[1][0] = 0.0
    if number:
        for name in ("exp_avg_sq", "max_exp_avg_sq"):
            if name in state[0]:
                state[0][name] = torch.zeros_like(state[0][name])
        # A first moment beside a second one of 0, and a maximum that is met.
        state[1]["exp_avg_sq"][0] = 0.0
        if amsgrad:
            state[1]["max_exp_avg_sq"] = 0.99 * state[1]["exp_avg_sq"] + 0.01 * gradient[1].square()
    step = StepArguments(rule, vectors(0), gradient, state, [settings] * 3)
    check(step, vectors(30), of_new_state(step))


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_clipping_unused_parameters_and_groups(kind: Any) -> None:
    rule = RULES[kind]
    base = dict(kind([torch.zeros(1)], lr=0.3).defaults) | ({"momentum": 0.9} if kind is SGD else {})
    settings = [base, {**base, "lr": 0.1}, base]
    gradient: list[Tensor | None] = [*vectors(10)]
    gradient[2] = None
    clip = lambda slopes: clipped(slopes, 0.7)  # noqa: E731
    step = StepArguments(rule, vectors(0), gradient, state_of(rule, base, 2, 20), settings, clip)
    check(step, vectors(30), of_new_state(step))
    assert pull_back(step, vectors(30)).gradient[2] is None


@pytest.mark.parametrize(
    ("rule", "settings"), [(SGD_RULE, SGD_SETTINGS[-1]), (ADAM_RULE, ADAM_SETTINGS[0]), (ADAM_RULE, ADAM_SETTINGS[-1])]
)
def test_a_hyperparameter_that_is_a_tensor(rule: OptimizerRule, settings: dict[str, Any]) -> None:
    settings = settings | {"lr": torch.tensor(0.2).double()}
    step = StepArguments(rule, vectors(0), vectors(10), state_of(rule, settings, 2, 20), [settings] * 3)
    check(step, vectors(30), of_new_state(step))
