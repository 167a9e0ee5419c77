"""A problem with a leading task axis equals as many problems without one."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.core import LossOutput
from mlotool.core.errors import ConfigError
from mlotool.hypergradient import SABA, Exact, Implicit, Penalty, Unrolled
from mlotool.problem.streams.stream import SameBatch
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from tests.program.small import assert_resumes

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
    roles = {"model": "learner", **({"start": "meta"} if isinstance(hypergradient, Implicit | Penalty | SABA) else {})}
    sgd = partial(torch.optim.SGD, lr=0.1)
    settings |= {"optimizer": partial(sgd, momentum=0.5), "unroll_steps": 2, "reset_to": "meta", "tasks": tasks}
    settings |= {"roles": roles, "stream": stream, "hypergradient": hypergradient or Unrolled()}
    lower = Problem("learner", net(), learn, **settings)
    other: Any = {"roles": {"model": "learner"}, "stream": SameBatch(stream), "optimizer": sgd}
    upper = Problem("meta", net(), generalize, **other)
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
    alone = [{"learner": episode, "meta": episode} for episode in episodes()[:TASKS]]
    singles = [maml(None, Implicit(Exact())).gradient("meta", batches) for batches in alone]
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
    assert_resumes(lambda: maml(TASKS), num_ticks=3, num_more=4)


def test_a_batch_of_other_tasks_is_refused() -> None:
    batch = stacked(episodes()[:2])
    with pytest.raises(ConfigError, match=r"shape \(2, 4, 2\); expected batches with 3 tasks"):
        maml(TASKS).gradient("meta", {"learner": [batch] * 2, "meta": batch})


def test_running_statistics_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected no running statistics with tasks=2"):
        Problem("w", nn.BatchNorm1d(2), lambda batch, *, w: w(batch).sum(), roles={"w": "w"}, tasks=2)


class Recurrent(nn.Module):
    """The support's samples as a sequence."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0])


class Applied(nn.Module):
    def __init__(self, function: Any, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.function, self.out = layer or nn.Linear(2, 3), function, nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(self.first(x)))


class Twice(torch.autograd.Function):
    """Without a rule for vmap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope


def positive_doubled(x: Tensor) -> Tensor:
    y = x.tanh().clone()
    y[y > 0] *= 2.0
    return y


UNMAPPED = {
    "LSTM": lambda: Recurrent(nn.LSTM(2, 1)),
    "mask": lambda: Applied(positive_doubled),
    "item": lambda: Applied(lambda x: x.tanh() * x.sum().item()),
    "autograd.Function": lambda: Applied(Twice.apply),
}
MAPPED = {"weight norm": lambda: Applied(torch.tanh, nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)))}


def gradient_through(module: Any, algorithm: Any, tasks: int | None, batch: Any, mode: str | None = None) -> Tensor:
    """Return a hypergradient through one step, or through the solution."""
    torch.manual_seed(0)
    role = {"problem": "learner", "mode": mode}

    def fit(batch: Any, *, model: Any, scale: Any = None) -> Tensor:
        factor = 1.0 if scale is None else scale(torch.ones(1, 1, dtype=torch.float64)).exp().sum()
        return factor * error(model, batch, "query" if scale is None else "support")

    settings: Any = {"roles": {"model": role, "scale": "scale"}, "hypergradient": algorithm, "tasks": tasks}
    sgd = partial(torch.optim.SGD, lr=0.1)
    lower = Problem("learner", module().double(), fit, optimizer=sgd, **settings)
    upper = Problem("scale", nn.Linear(1, 1).double(), fit, roles={"model": role})
    program = Program([upper, lower], Graph({"scale": ["learner"]}, {"learner": ["scale"]}))
    return program.gradient("scale", {"learner": batch, "scale": batch})["bias"]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("algorithm", [Unrolled(), Implicit(Exact(damping=1.0))], ids=["unrolled", "exact"])
@pytest.mark.parametrize("name", [*UNMAPPED, *MAPPED])
def test_a_loss_that_vmap_cannot_take_is_evaluated_task_by_task(name: str, algorithm: Any) -> None:
    module = (UNMAPPED | MAPPED)[name]
    batch = stacked(episodes()[:TASKS])
    with pytest.warns(match="problems.*tasks: torch.vmap cannot") if name in UNMAPPED else nullcontext():
        found = gradient_through(module, algorithm, TASKS, batch)
    alone = [gradient_through(module, algorithm, None, episode) for episode in episodes()[:TASKS]]
    assert torch.allclose(found, torch.stack(alone).mean(0), rtol=1e-9, atol=1e-13)


def test_what_is_wrong_without_vmap_too_is_the_losss_own_error() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        gradient_through(lambda: Applied(lambda x: x @ x), Unrolled(), TASKS, stacked(episodes()[:TASKS]))


class Counting(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x) / self.count


MOVING = {
    "spectral norm": lambda: Applied(torch.tanh, nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3))),
    "counter": lambda: Counting(nn.Linear(2, 1)),
    "counter beside a mask": lambda: Counting(Applied(positive_doubled)),
}


@pytest.mark.parametrize("name", MOVING)
def test_a_module_that_moves_its_buffers_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"learner.module: found .the buffer .*which its forward moves.*mode: eval"):
        gradient_through(MOVING[name], Unrolled(), TASKS, stacked(episodes()[:TASKS]))


def test_a_spectral_norm_that_stays_in_eval_mode() -> None:
    batch, module = stacked(episodes()[:TASKS]), MOVING["spectral norm"]
    found = gradient_through(module, Unrolled(), TASKS, batch, "eval")
    alone = [gradient_through(module, Unrolled(), None, episode, "eval") for episode in episodes()[:TASKS]]
    assert torch.allclose(found, torch.stack(alone).mean(0), rtol=1e-9)
