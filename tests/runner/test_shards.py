"""Sharded problems: two real processes that talk by gloo, against one rank with the joined batches."""

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool.config import compose
from mlotool.core.errors import ConfigError, NonFiniteParametersError
from mlotool.distributed.collectives import Ranks, all_ranks
from mlotool.hypergradient import ConjugateGradient, FirstOrder, Implicit, Unrolled
from mlotool.problem import shards
from mlotool.problem.shards import check_rows, gathered
from mlotool.program import Graph, Problem, Program, Schedule, Stream
from mlotool.runner.checkpoint import read_whole_checkpoint
from mlotool.runner.distributed import check_agreement, distribute, merge_shards
from mlotool.runner.loading import evaluate
from mlotool.runner.run_config import World, joined, run
from mlotool.runner.values import check_parameters
from tests.hypergradient.every_algorithm import Batch, Rows, clean_and_decayed, sample_losses, weighted
from tests.over_ranks import over
from tests.program.small import assert_identical, momentum
from tests.runner.processes import run_ranks

NUM_TICKS = 4
WIDTH = 32


class Net(nn.Module):
    """Layers in a sequence, a frozen one, a spare parameter that no loss uses, a tied one, and a method."""

    def __init__(self, num_inputs: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(num_inputs)
        self.body = nn.Sequential(nn.Linear(num_inputs, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.body[2].weight  # type: ignore[assignment]
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 1)
        self.spare = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(()))
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))

    def hidden(self, inputs: Tensor) -> Tensor:
        """Return what comes before the head."""
        return self.frozen(torch.tanh(self.again(self.body(inputs)))) * self.scale

    def forward(self, inputs: Tensor) -> Tensor:
        """Return one number a sample."""
        return self.head(torch.tanh(self.hidden(inputs)))[:, 0]


def plain_loss(batch: Batch, *, model: Any) -> Tensor:
    return sample_losses(batch, model).mean()


def every_use(batch: Batch, *, model: Any, same: Any) -> Tensor:
    """Call the module twice, in two roles, one of its methods, and read its parameters."""
    consistency = (model(batch["input"]) - same(batch["input"] + 0.1)).square()
    hidden = model.method("hidden", batch["input"]).square().mean(1)
    decay = sum(tensor.square().sum() for name, tensor in model.named_parameters() if "body" in name)
    moved = model.at({"head.bias": torch.ones(1, dtype=torch.float64)})(batch["input"])
    return (sample_losses(batch, model) + consistency + 0.1 * hidden + 0.1 * moved.sin()).mean() + 0.01 * decay


def alone(loss: Callable[..., Tensor] = plain_loss, roles: tuple[str, ...] = ("model",), **settings: Any) -> Program:
    """A single problem on batches of 5, 5 and 2 samples."""
    stream = Stream(Rows(1), 5, shuffle=False, drop_last=False)
    made = {"optimizer": partial(torch.optim.AdamW, lr=0.05, fused=True), "shard": True, **settings}
    problem = Problem("model", Net(), loss, roles=dict.fromkeys(roles, "model"), stream=stream, **made)
    return Program([problem], Graph())


def two_levels(*sharded: str, **settings: Any) -> Program:
    """Meta-Weight-Net with batches of 5, 5 and 2 samples, and of 11 and 1; `settings` go to the lower problem."""
    roles = {"model": "model", "weigher": "weigher"}
    lower = Problem(
        "model",
        Net(),
        weighted,
        roles=roles,
        stream=Stream(Rows(1), 5, shuffle=False, drop_last=False),
        **{"optimizer": momentum, "unroll_steps": 2, "shard": "model" in sharded, "hypergradient": FirstOrder()}
        | settings,
    )
    upper = Problem(
        "weigher",
        Net(1),
        clean_and_decayed,
        roles=roles,
        stream=Stream(Rows(2), 11, seed=2, drop_last=False),
        optimizer=partial(torch.optim.Adam, lr=0.05, fused=True),
        shard="weigher" in sharded,
    )
    return Program([lower, upper], Graph({"weigher": ["model"]}, {"model": ["weigher"]}))


every_use_of_some = partial(alone, every_use, ("model", "same"), shard=["body.2.*", "frozen.*", "head.*", "spare"])

PROGRAMS: dict[str, Callable[[], Program]] = {
    "alone": alone,
    "fused": partial(alone, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    # Of Adagrad the state is there from the beginning.
    "adagrad": partial(alone, optimizer=partial(torch.optim.Adagrad, lr=0.1)),
    "clipped": partial(
        alone,
        optimizer=momentum,
        gradient_clip_norm=0.5,
        accumulate_batches=2,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=2),
    ),
    "every_use": partial(alone, every_use, ("model", "same")),
    "lower": partial(two_levels, "model"),
    "upper": partial(two_levels, "weigher"),
    "both": partial(two_levels, "model", "weigher", roll_back=True),
    # Some parameters are divided: of a tied one, a frozen one, one of a single row, one that no loss uses.
    "some": partial(
        every_use_of_some, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True), gradient_clip_norm=0.5
    ),
    "some_adam": partial(alone, shard=["*.weight"], accumulate_batches=2),
    "some_lower": partial(two_levels, "model", shard=["body.*", "frozen.*", "head.*", "spare"], roll_back=True),
}

IN_GROUPS = "every_use", "both"


def compute(ranks: Ranks, names: Iterable[str] = PROGRAMS) -> dict[str, dict[str, Tensor]]:
    """Return, by program, the gradients at the start and all states after ticks, in whole tensors."""
    found = {}
    for name in names:
        made = over(ranks, PROGRAMS[name]())
        gradients = {
            f"{problem}/{key}": value
            for problem in made.problems
            for key, value in gathered(made.gradient(problem), is_kept=True).items()
        }
        schedule, losses = Schedule(made), []
        for _ in range(NUM_TICKS):
            stepped = [each.metrics for each in schedule.tick().values()]
            losses += [metrics["gradient_norm"] for metrics in stepped if "gradient_norm" in metrics]
        check_agreement(made, ranks, NUM_TICKS)
        check_parameters(made, NUM_TICKS)
        after = tensors(gathered(made.state_dict(), is_kept=True))
        found[name] = {**gradients, **after, "norms": torch.stack(losses) if losses else torch.zeros(())}
    return found


def tensors(tree: Any, path: str = "state") -> dict[str, Tensor]:
    """Return the floating-point tensors of nested containers by path."""
    if isinstance(tree, Mapping):
        tree = tree.items()
    elif isinstance(tree, list | tuple):
        tree = enumerate(tree)
    else:
        return {path: tree} if isinstance(tree, Tensor) and tree.is_floating_point() else {}
    return {name: tensor for key, value in tree for name, tensor in tensors(value, f"{path}/{key}").items()}


def shares(shard: Any = True) -> dict[str, tuple[int, int]]:
    """Return, of what this rank holds, the numbers that there are: of parameters, gradients' and optimizer's state."""
    made = over(all_ranks(), alone(shard=shard))
    problem = made.problems["model"]
    whole = sum(each.numel() for each in Net().parameters())
    trained = sum(each.numel() for each in Net().parameters() if each.requires_grad)
    _, gradient = made.internals.training_gradient("model", problem.stream.next(), None)  # type: ignore[union-attr]
    Schedule(made).tick()
    state = [each for kept in problem.optimizer.state.values() for each in kept.values() if each.dim()]  # type: ignore[union-attr]
    return {
        "parameters": (_held(problem.module.parameters()), whole),
        "gradient": (_held(each for each in gradient if each is not None), trained - 3),
        "state": (_held(state), 2 * (trained - 3)),
    }


def _held(many: Any) -> int:
    return sum((each.to_local() if hasattr(each, "to_local") else each).numel() for each in many)


def resumed(ranks: Ranks, name: str) -> list[dict[str, Tensor]]:
    """Return the state at the end of a run that goes on from whole tensors, and of one that was never interrupted."""
    ends = []
    for is_interrupted in (False, True):
        made = over(ranks, PROGRAMS[name]())
        schedule = Schedule(made)
        schedule.tick()
        if is_interrupted:
            # In the middle of a look-ahead, whose snapshot is of shards as well.
            state, moment = (gathered(each.state_dict(), is_kept=True) for each in (made, schedule))
            made = over(ranks, PROGRAMS[name]())
            schedule = Schedule(made)
            made.load_state_dict(state)
            schedule.load_state_dict(moment)
        for _ in range(2):
            schedule.tick()
        ends.append(tensors(gathered(made.state_dict(), is_kept=True)))
    return ends


def merged(ranks: Ranks, name: str) -> dict[str, Any]:
    """Return what the first rank has, and the whole state before."""
    made = over(ranks, PROGRAMS[name]())
    Schedule(made).tick()
    before = tensors(gathered(made.state_dict(), is_kept=True))
    batch = Rows(3)[[0, 1, 2]]["input"]
    read = made.problems["model"].reading(training=False)(batch).detach()
    merge_shards(made, ranks)
    if not ranks.is_first:
        return {"before": before, "read": read}
    made.load_state_dict(made.state_dict())
    after = tensors(made.state_dict())
    return {"before": before, "after": after, "read": read, "call": made.problems["model"].module(batch).detach()}


def unfinite(ranks: Ranks) -> str:
    """Return what a rank says when only the second one's shard has a NaN."""
    made = over(ranks, alone())
    with torch.no_grad():
        part: Any = made.problems["model"].theta["head.weight" if ranks.is_first else "body.0.weight"]
        if not ranks.is_first:
            part.to_local().fill_(float("nan"))
    try:
        check_parameters(made, 5)
    except NonFiniteParametersError as error:
        return str(error)
    return "nothing was raised"


def config() -> Any:
    """Return a run of a few seconds, with evaluations between and at the end."""
    problem = {"shard": "true", "module.hidden": "[9]", "optimizer.lr": 0.1, "stream.batch_size": 15}
    runner = {"devices": 2, "accelerator": "cpu", "report": "false", "progress_bar": "false", "log_every": 1}
    words = [f"problems.classifier.{key}={value}" for key, value in problem.items()]
    words += [f"runner.{key}={value}" for key, value in {**runner, "max_ticks": 4}.items()]
    return compose("plain", [*words, "logger=csv", "debug.limit_samples=50", "evaluate.splits={val: 2, test: end}"])


def runs(folder: Path, settings: Any) -> list[Mapping[str, float]]:
    """Return the metrics of a run, and of one that was ended before and goes on."""
    whole = run(settings, output_dir=folder / "whole").metrics
    shorter = settings.copy()
    shorter.runner.max_ticks = 2
    run(shorter, output_dir=folder / "parts")
    return [whole, run(settings, resume=folder / "parts").metrics]


def main(folder: Path, settings: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with joined(World.find(os.environ), torch.device("cpu")) as ranks:
        found: dict[str, Any] = {"shares": shares(), "shares of some": shares(["[!z]*"])}
        found["one group"] = compute(ranks)
        shards.MIN_BLOCK = 1
        found["groups"] = compute(ranks, IN_GROUPS)
        found["resumed"] = {name: resumed(ranks, name) for name in ("both", "some_lower")}
        found["merged"] = {name: merged(ranks, name) for name in ("lower", "some_lower")}
        found["unfinite"] = unfinite(ranks)
        found["runs"] = runs(folder, settings)
        torch.save(found, folder / f"rank_{ranks.rank}.pt")


Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the two ranks leave their files."""
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def found(folder: Path) -> tuple[Found, Found, Found]:
    """Return what one rank computes, and what each of two does."""

    def meanwhile() -> Found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute(Ranks())

    found, (first, second) = run_ranks(main, 2, folder, config(), meanwhile=meanwhile)
    return found, first, second


@pytest.mark.parametrize(
    ("kind", "name"), [*(("one group", name) for name in PROGRAMS), *(("groups", name) for name in IN_GROUPS)]
)
def test_shards_equal_one_rank_with_the_joined_batches(found: tuple[Found, Found, Found], kind: str, name: str) -> None:
    """Gradients at the start, then parameters, optimizers' states and norms after ticks, with unequal shares."""
    expected = found[0][name]
    for each in found[1:]:
        assert each[kind][name].keys() == expected.keys()
        for key, value in each[kind][name].items():
            error = (value - expected[key]).abs().max() / expected[key].abs().max().clamp_min(1e-12)
            assert error < 1e-9, (key, float(error))


@pytest.mark.parametrize("name", ["shares", "shares of some"])
def test_each_rank_holds_about_half(found: tuple[Found, Found, Found], name: str) -> None:
    first, second = (each[name] for each in found[1:])
    for kind, (held, whole) in first.items():
        assert held + second[kind][0] == whole
        assert abs(held / whole - 0.5) < 0.02, kind


@pytest.mark.parametrize("name", ["both", "some_lower"])
def test_a_run_goes_on_from_whole_tensors_bit_by_bit(found: tuple[Found, Found, Found], name: str) -> None:
    for each in found[1:]:
        whole, resumed = each["resumed"][name]
        assert_identical(resumed, whole)


@pytest.mark.parametrize("name", ["lower", "some_lower"])
def test_the_first_rank_goes_on_with_the_whole_problem(found: tuple[Found, Found, Found], name: str) -> None:
    merged = found[1]["merged"][name]
    assert_identical(merged["after"], merged["before"])
    assert torch.equal(merged["call"], merged["read"])


def test_all_ranks_find_what_is_not_finite_in_one_shard(found: tuple[Found, Found, Found]) -> None:
    for each in found[1:]:
        assert "The parameters of problem 'model' were found to be NaN or infinite after tick 5" in each["unfinite"]


def test_a_run_evaluates_saves_and_goes_on(found: tuple[Found, Found, Found], folder: Path) -> None:
    """Its checkpoints hold whole tensors, which one process loads."""
    whole, resumed = found[1]["runs"]
    assert whole == resumed == found[2]["runs"][0]
    states = [read_whole_checkpoint(folder / name / "checkpoints/last.ckpt") for name in ("whole", "parts")]
    first, second = (tensors([state["state_dict"], state["mlotool"]["program"]]) for state in states)
    assert_identical(first, second)
    assert first["state/0/problem_classifier.layers.1.weight"].shape == (9, 64)
    assert evaluate(folder / "parts", "test") == {"test/accuracy": whole["test/accuracy"]}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: sharded("model", Implicit(ConjugateGradient(3, 1e-8))),
            ["the solution of 'model' by Implicit", "first_order"],
        ),
        (lambda: sharded("weigher", Unrolled()), ["problems.weigher.shard: found shard", "by Unrolled"]),
        (lambda: alone(shard=["body.*", "tail.*"]), ["shard: found 'tail.*'", "body.0.weight"]),
        (lambda: alone(compile=True), ["problems.model.shard: found compile with shard", "torch.compile"]),
        (lambda: two_levels("weigher", reset_to="weigher"), ["problems.weigher.shard", "problems.model.reset_to"]),
    ],
)
def test_what_shards_cannot_do_is_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    for word in words:
        assert word in message


def sharded(name: str, hypergradient: Any) -> Program:
    return two_levels(name, hypergradient=hypergradient)


def test_parameters_without_rows_are_refused() -> None:
    ordered = nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)
    single = nn.ParameterDict({"rate": nn.Parameter(torch.ones(()))})
    for module, words in ((ordered, "rows in the usual order, .* unlike those of 'weight'"), (single, "'rate'")):
        with pytest.raises(ConfigError, match=rf"^problems\.x\.shard: .* {words}"):
            check_rows("problems.x.shard", "true", module.named_parameters())


def test_one_rank_says_that_it_has_nothing_to_share_with() -> None:
    made = alone()
    with pytest.warns(UserWarning, match=r"problems\.model\.shard: has no effect with a single process"):
        distribute(made, Ranks(), seed=0)
    assert made.problems["model"].shards is None
