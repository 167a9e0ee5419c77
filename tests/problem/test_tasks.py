"""A problem with a leading task axis equals as many problems without one."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core import LossOutput
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import SABA, Exact, Implicit, Penalty, Unrolled
from mlotool.problem.same_batch import SameBatch
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from tests.program.small import assert_identical, parameters

TASKS, SIZE = 3, 4


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def episodes() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(2 * TASKS):
        draw = partial(torch.randn, dtype=torch.float64, generator=generator)
        made.append({"support": draw(SIZE, 2), "query": draw(SIZE, 2), "slope": draw(2)})
    return made


def error(model: Any, batch: Any, part: str) -> Tensor:
    return ((model(batch[part]).squeeze(-1) - batch[part] @ batch["slope"]) ** 2).mean()


def learn(batch: Any, *, model: Any, start: Any = None) -> LossOutput:
    loss = error(model, batch, "support")
    if start is not None:
        pairs = zip(model.parameters(), start.parameters(), strict=True)
        loss = loss + sum(((a - b) ** 2).sum() for a, b in pairs)
    return LossOutput(loss, {"error": loss.detach()})


def generalize(batch: Any, *, model: Any) -> Tensor:
    return error(model, batch, "query")


def maml(tasks: int | None, hypergradient: Any = None, batches: list[Any] | None = None, **settings: Any) -> Program:
    """Return MAML; a proximal term towards the start where the hypergradient is implicit."""
    data = episodes() if batches is None else batches
    stream = Stream(data, TASKS, shuffle=False, repeat=2)
    # Where the steps are not seen, the start shapes the solution through a proximal term.
    is_stationary = isinstance(hypergradient, Implicit | Penalty | SABA)
    lower = Problem(
        "learner",
        net(),
        learn,
        roles={"model": "learner", **({"start": "meta"} if is_stationary else {})},
        stream=stream,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5),
        unroll_steps=2,
        reset_to="meta",
        tasks=tasks,
        hypergradient=hypergradient or Unrolled(),
        **settings,
    )
    upper = Problem(
        "meta",
        net(),
        generalize,
        roles={"model": "learner"},
        stream=SameBatch(stream),
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    return Program([lower, upper], Graph({"meta": ["learner"]}, {"learner": ["meta"]}))


def stacked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([each[key] for each in samples]) for key in samples[0]}


def one_by_one(make: Any, **settings: Any) -> dict[str, Tensor]:
    """Return the mean over tasks of the gradients of programs without a task axis."""
    found: list[dict[str, Tensor]] = []
    for episode in episodes()[:TASKS]:
        single = maml(None, make(), **settings)
        found.append(single.gradient("meta", {"learner": [episode] * 2, "meta": episode}))
    return {key: sum(each[key] for each in found) / TASKS for key in found[0]}


@pytest.mark.parametrize("clip", [None, 0.3])
def test_unrolled_maml_equals_a_loop_over_tasks(clip: float | None) -> None:
    batch = stacked(episodes()[:TASKS])
    found = maml(TASKS, gradient_clip_norm=clip).gradient("meta", {"learner": [batch] * 2, "meta": batch})
    expected = one_by_one(Unrolled, gradient_clip_norm=clip)
    assert all(torch.allclose(found[key], expected[key], rtol=1e-10, atol=1e-13) for key in expected)


def test_implicit_maml_equals_a_loop_over_tasks() -> None:
    batch = stacked(episodes()[:TASKS])
    found = maml(TASKS, Implicit(Exact())).gradient("meta", {"learner": batch, "meta": batch})
    singles = []
    for episode in episodes()[:TASKS]:
        singles.append(maml(None, Implicit(Exact())).gradient("meta", {"learner": episode, "meta": episode}))
    for key, value in found.items():
        assert torch.allclose(value, sum(each[key] for each in singles) / TASKS, rtol=1e-9, atol=1e-12)


def test_a_schedule_resets_repeats_the_batch_and_gives_it_to_the_upper_problem() -> None:
    program = maml(TASKS)
    schedule = Schedule(program)
    start = {key: tensor.clone() for key, tensor in program.problems["meta"].constants().items()}
    reference = maml(TASKS)
    batch = stacked(episodes()[:TASKS])
    expected = reference.gradient("meta", {"learner": [batch] * 2, "meta": batch})
    schedule.tick()
    results = schedule.tick()
    assert set(results) == {"learner", "meta"}
    for key, value in program.problems["meta"].constants().items():
        assert torch.allclose(value, start[key] - 0.1 * expected[key], rtol=1e-10)
    # The next unroll begins at the new start, on the next tasks.
    schedule.tick()
    single = maml(TASKS, batches=[stacked(episodes()[TASKS:])])
    assert single.problems["learner"].theta["0.weight"].shape == (TASKS, 3, 2)
    assert program.problems["learner"].stream.state_dict()["batches_consumed"] == 2


def test_the_steps_of_tasks_are_independent() -> None:
    program = maml(TASKS)
    Schedule(program).tick()
    for number, episode in enumerate(episodes()[:TASKS]):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        error(model, episode, "support").backward()
        optimizer.step()
        for key, tensor in model.named_parameters():
            assert torch.allclose(program.problems["learner"].theta[key][number], tensor, rtol=1e-12)


def test_a_resumed_run_is_bit_identical() -> None:
    whole, first, second = maml(TASKS), maml(TASKS), maml(TASKS)
    runs = Schedule(whole), Schedule(first), Schedule(second)
    for _ in range(3):
        runs[1].tick()
    second.load_state_dict(first.state_dict())
    runs[2].load_state_dict(runs[1].state_dict())
    for _ in range(4):
        runs[2].tick()
    for _ in range(7):
        runs[0].tick()
    assert_identical(parameters(second), parameters(whole))


def test_a_batch_of_other_tasks_is_refused() -> None:
    batch = stacked(episodes()[:2])
    with pytest.raises(ConfigError, match=r"shape \(2, 4, 2\) in a batch for 3 tasks"):
        maml(TASKS).gradient("meta", {"learner": [batch] * 2, "meta": batch})


def test_running_statistics_are_refused() -> None:
    with pytest.raises(ConfigError, match="found the running statistics running_mean with tasks=2"):
        Problem("w", nn.BatchNorm1d(2), lambda batch, *, w: w(batch).sum(), roles={"w": "w"}, tasks=2)


@pytest.mark.parametrize("tasks", [0, 1.5])
def test_bad_numbers(tasks: Any) -> None:
    with pytest.raises(ConfigError, match=r"problems.w.tasks: found"):
        Problem("w", net(), lambda batch, *, w: w(batch).sum(), roles={"w": "w"}, tasks=tasks)
