"""What `mlotool run` costs above a loop by hand that does the same arithmetic, on the mwn recipe.

    python -m benchmarks.framework_tax

Three rivals: the whole of `mlotool.run` (Lightning, logging, evaluations, checkpoints), timed around the trainer's
`fit`; the plain torch engine alone (`Schedule.tick` in a loop); and a bare loop, with torch's default optimizers
where the engine has fused ones. The last two evaluate the validation split as often as the run does. All three use
the recipe's own data, models, settings and seeds.

They take turns every 50 ticks: the run's clock stands still while the other two do theirs, so that a noisy machine
hits all of them alike.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional

import mlotool
from benchmarks.harness import record
from benchmarks.harness.rounds import Seconds, summarize
from mlotool.config import build
from mlotool.program import Schedule

RADIUS = 0.01
BASE, SCHEDULE, RUN = "bare loop", "Schedule.tick", "mlotool.run"
PINNED = (
    "problems.classifier.warmup_steps=0",
    "problems.classifier.unroll_steps=1",
    "problems.classifier.roll_back=false",
    "problems.classifier.accumulate_batches=1",
    "problems.reweight.accumulate_batches=1",
    "problems.classifier.gradient_clip_norm=null",
    "problems.reweight.gradient_clip_norm=null",
    "hypergradient=finite_difference",
)
"""What the bare loop takes for granted; a recipe may change, and the loops would then do different work."""
CHECKED_TICKS, LARGEST_DIFFERENCE = 50, 1e-3
"""Rivals whose parameters are further apart after so many ticks (float32) do not do the same arithmetic."""
TICKS_A_TURN = 50


@dataclass
class Rival:
    """What is timed.

    Args:
        train: does so many ticks, with the evaluations that fall due.
        parameters: those that it trains, in one order for all rivals.
    """

    train: Callable[[int], None]
    parameters: Callable[[], list[Tensor]]


class Stopwatch:
    """Adds up the time between `go` and `hold`."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    def go(self) -> None:
        """Begin or go on."""
        self.wall -= time.perf_counter()
        self.cpu -= time.process_time()

    def hold(self) -> None:
        """Stand still."""
        self.wall += time.perf_counter()
        self.cpu += time.process_time()


def race(config: Any) -> dict[str, tuple[Seconds, list[Tensor]]]:
    """Train all rivals; return their seconds a tick, and the trained parameters."""
    rivals = {BASE: by_hand(config), SCHEDULE: by_schedule(config)}
    watches = {name: Stopwatch() for name in (*rivals, RUN)}
    tick, num_ticks = Schedule.tick, 0

    def take_turns(schedule: Schedule) -> Any:
        nonlocal num_ticks
        result = tick(schedule)
        num_ticks += 1
        if num_ticks % TICKS_A_TURN == 0:
            watches[RUN].hold()
            Schedule.tick = tick
            for name, rival in rivals.items():
                watches[name].go()
                rival.train(TICKS_A_TURN)
                watches[name].hold()
            Schedule.tick = take_turns
            watches[RUN].go()
        return result

    with tempfile.TemporaryDirectory() as folder, _timed_fit(watches[RUN]):
        Schedule.tick = take_turns
        try:
            mlotool.run(config, output_dir=Path(folder) / "run")
        finally:
            Schedule.tick = tick
        trained = {name: mlotool.load(Path(folder) / "run", name, "last").state_dict() for name in config.problems}
    parameters = {name: rival.parameters() for name, rival in rivals.items()}
    parameters[RUN] = [trained[name][key] for name, key in _names(config)]
    return {
        name: (Seconds(watch.wall / num_ticks, watch.cpu / num_ticks), parameters[name])
        for name, watch in watches.items()
    }


def by_schedule(config: Any) -> Rival:
    """Return the plain torch engine."""
    built = _build(config)
    return _rival(config, built, Schedule(built.program).tick)


def by_hand(config: Any) -> Rival:
    """Return a loop that knows nothing but the recipe's models, streams and optimizers."""
    built = _build(config)
    lower, upper = (built.program.problems[name] for name in ("classifier", "reweight"))
    theta, phi = list(lower.module.parameters()), list(upper.module.parameters())
    lower_optimizer, upper_optimizer = _default(lower.optimizer), _default(upper.optimizer)

    is_normalized = config.problems.classifier.loss.get("normalize", True)

    def weighted(weights: Tensor, losses: Tensor) -> Tensor:
        total = (weights * losses).sum()
        return total / weights.sum().clamp_min(1e-12) if is_normalized else total / len(losses)

    def losses_of(batch: Any) -> tuple[Tensor, Tensor]:
        logits = lower.module(batch["input"])
        return logits, functional.cross_entropy(logits, batch["target"], reduction="none")

    def gradient_at(batch: Any, constants: Tensor) -> Sequence[Tensor]:
        with torch.no_grad():
            losses = losses_of(batch)[1]
        return grad(weighted(upper.module(constants).squeeze(1), losses), phi)

    def tick() -> None:
        train = lower.stream.next()
        logits, losses = losses_of(train)
        with torch.no_grad():
            weights = upper.module(losses.detach()[:, None]).squeeze(1)
            _accuracy(logits, train)
            weights.mean()
        _step(lower_optimizer, theta, grad(weighted(weights, losses), theta))

        meta = upper.stream.next()
        logits = lower.module(meta["input"])
        vector = grad(functional.cross_entropy(logits, meta["target"]), theta)
        _accuracy(logits, meta)

        scale = RADIUS / torch.linalg.vector_norm(torch.stack(torch._foreach_norm(vector)))
        direction = torch._foreach_mul(vector, scale)
        with torch.no_grad():
            constants = losses_of(train)[1][:, None]
        data = [parameter.data for parameter in theta]
        torch._foreach_add_(data, direction)
        above = gradient_at(train, constants)
        torch._foreach_sub_(data, direction, alpha=2.0)
        below = gradient_at(train, constants)
        torch._foreach_add_(data, direction)
        _step(upper_optimizer, phi, torch._foreach_mul(torch._foreach_sub(below, above), 0.5 / scale))

    return _rival(config, built, tick)


def _build(config: Any) -> Any:
    torch.manual_seed(config.seed)
    pytorch_lightning.seed_everything(config.seed, workers=True, verbose=False)
    return build(config)


def _rival(config: Any, built: Any, tick: Callable[[], Any]) -> Rival:
    problems = built.program.problems
    model, validation = problems[config.evaluate.problem].module, built.data.split("val")
    every = config.evaluate.splits.val
    numbers = itertools.count(1)

    def train(num_ticks: int) -> None:
        for number in itertools.islice(numbers, num_ticks):
            tick()
            if number % every == 0:
                _validate(model, validation)

    return Rival(
        train,
        lambda: [dict(problems[name].module.named_parameters())[key].detach() for name, key in _names(config)],
    )


def _default(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that a loop by hand would build: the same settings, torch's default kernels."""
    (group,) = optimizer.param_groups
    return type(optimizer)(**{**group, "fused": None})


@torch.no_grad()
def _validate(model: torch.nn.Module, dataset: Any) -> None:
    model.eval()
    batch = dataset.__getitems__(range(len(dataset)))
    _accuracy(model(batch["input"]), batch).item()
    model.train()


def _accuracy(logits: Tensor, batch: Any) -> Tensor:
    return (logits.detach().argmax(dim=1) == batch["target"]).float().mean()


def _step(optimizer: torch.optim.Optimizer, parameters: Sequence[Any], gradient: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, gradient, strict=True):
        parameter.grad = value
    optimizer.step()
    optimizer.zero_grad()


def _names(config: Any) -> list[tuple[str, str]]:
    """Return the names of all parameters, in one order for all rivals."""
    problems = build(config).program.problems
    return [(name, key) for name in sorted(problems) for key, _ in problems[name].module.named_parameters()]


@contextmanager
def _timed_fit(watch: Stopwatch) -> Iterator[None]:
    """Time `Trainer.fit`: what summary.json calls training_s."""
    original = pytorch_lightning.Trainer.fit

    def fit(*args: Any, **kwargs: Any) -> None:
        watch.go()
        original(*args, **kwargs)
        watch.hold()

    pytorch_lightning.Trainer.fit = fit
    try:
        yield
    finally:
        pytorch_lightning.Trainer.fit = original


def _differences(overrides: list[str]) -> dict[str, float]:
    """Return how far each rival's parameters are from the bare loop's, relative to how far those moved.

    The larger one of the two problems' distances. Ends the program where the rivals do different work.
    """
    short = [f"runner.max_ticks={CHECKED_TICKS}", f"evaluate.splits.val={CHECKED_TICKS}"]
    config = mlotool.compose("mwn", [*overrides, *short])
    names = [name for name, _ in _names(config)]
    problems = _build(config).program.problems
    start = [dict(problems[name].module.named_parameters())[key].detach() for name, key in _names(config)]
    ends = {name: end for name, (_, end) in race(config).items()}

    def distance(a: list[Tensor], b: list[Tensor], problem: str) -> float:
        pairs = zip(names, a, b, strict=True)
        return sum(float((x - y).double().square().sum()) for name, x, y in pairs if name == problem) ** 0.5

    found = {
        rival: max(distance(end, ends[BASE], name) / distance(ends[BASE], start, name) for name in set(names))
        for rival, end in ends.items()
    }
    if max(found.values()) > LARGEST_DIFFERENCE:
        raise SystemExit(
            f"After {CHECKED_TICKS} ticks the parameters differ from the bare loop's by {found}, relative to how far "
            f"those moved; expected at most {LARGEST_DIFFERENCE}. The recipe asks for other arithmetic than the bare "
            "loop does: no times are reported. Bring by_hand or PINNED up to date."
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--ticks", type=int, default=500)
    parser.add_argument("--override", nargs="*", default=[], help="more overrides, e.g. logger=wandb")
    parser.add_argument("--output", type=Path, help="JSON file; default: benchmarks/results/framework_tax.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    where = record.surroundings(("torch", "pytorch-lightning"))  # before the run: the checkout may move on meanwhile
    overrides = [
        f"runner.max_ticks={arguments.ticks}",
        "runner.num_threads=1",
        "runner.accelerator=cpu",
        "runner.report=false",
        "runner.progress_bar=false",
        "logger=csv",
        *PINNED,
        *arguments.override,
    ]
    config = mlotool.compose("mwn", overrides)
    differences = _differences(overrides)
    found: dict[str, list[Seconds]] = {}
    for _ in range(arguments.rounds):
        for name, (seconds, _) in race(config).items():
            found.setdefault(name, []).append(seconds)
    content = {
        **where,
        "mlotool": mlotool.__version__,
        "recipe": "mwn",
        "overrides": overrides,
        "num_rounds": arguments.rounds,
        "against_bare_loop": {clock: summarize(found, BASE, clock) for clock in ("cpu", "wall")},
        "against_schedule": {clock: summarize(found, SCHEDULE, clock) for clock in ("cpu", "wall")},
        "difference": differences,
    }
    print("| rival | ms a tick | time / bare loop (quartiles) | time / Schedule.tick (quartiles) | difference |")
    print("|---|---|---|---|---|")
    for name, each in content["against_bare_loop"]["cpu"].items():
        cells = [f"{each['ms']:.3f}"]
        for ratio in (each, content["against_schedule"]["cpu"][name]):
            cells.append(f"{ratio['ratio']:.3f} ({ratio['ratio_quartile_1']:.3f}-{ratio['ratio_quartile_3']:.3f})")
        print(f"| {name} | {' | '.join(cells)} | {content['difference'][name]:.1e} |")
    print(f"\nwritten to {record.write('framework_tax', content, arguments.output)}")


if __name__ == "__main__":
    main()
