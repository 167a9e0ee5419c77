"""What `mlotool run` costs above a loop by hand that does the same arithmetic, on the mwn recipe.

    python -m benchmarks.framework_tax

Three rivals take turns: the whole of `mlotool.run` (Lightning, logging, evaluations, checkpoints), timed around
the trainer's `fit`; the plain torch engine alone (`Schedule.tick` in a loop); and a bare loop. The last two evaluate
the validation split as often as the run does. All three use the recipe's own data, models, optimizers and seeds.
"""

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
BASE = "bare loop"
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
CHECKED_TICKS, LARGEST_DIFFERENCE = 5, 1e-3
"""Rivals whose parameters are further apart after so many ticks (float32) do not do the same arithmetic."""
Train = Callable[[Any], tuple[Seconds, list[Tensor]]]
"""Trains a config; returns the seconds a tick, and the trained parameters."""


def train_by_run(config: Any) -> tuple[Seconds, list[Tensor]]:
    """Train by `mlotool.run`."""
    with tempfile.TemporaryDirectory() as folder, _timed_fit() as seconds:
        mlotool.run(config, output_dir=Path(folder) / "run")
        state = torch.load(Path(folder) / "run" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    parameters = [state[f"problem_{name}.module.{key}"] for name, key in _names(config)]
    return _per_tick(seconds[0], config), parameters


def train_by_schedule(config: Any) -> tuple[Seconds, list[Tensor]]:
    """Train by the plain torch engine."""
    built = _build(config)
    schedule = Schedule(built.program)
    return _train(config, built, schedule.tick)


def train_by_hand(config: Any) -> tuple[Seconds, list[Tensor]]:
    """Train by a loop that knows nothing but the recipe's models, streams and optimizers."""
    built = _build(config)
    lower, upper = (built.program.problems[name] for name in ("classifier", "reweight"))
    theta, phi = list(lower.module.parameters()), list(upper.module.parameters())

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
        _step(lower.optimizer, theta, grad(weighted(weights, losses), theta))

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
        _step(upper.optimizer, phi, torch._foreach_mul(torch._foreach_sub(below, above), 0.5 / scale))

    return _train(config, built, tick)


def _build(config: Any) -> Any:
    torch.manual_seed(config.seed)
    pytorch_lightning.seed_everything(config.seed, workers=True, verbose=False)
    return build(config)


def _train(config: Any, built: Any, tick: Callable[[], Any]) -> tuple[Seconds, list[Tensor]]:
    model = built.program.problems[config.evaluate.problem].module
    validation = built.data.split("val")
    every = config.evaluate.splits.val
    with _without_lightning(), _stopwatch() as seconds:
        for number in range(1, config.runner.max_ticks + 1):
            tick()
            if number % every == 0:
                _validate(model, validation)
    problems = built.program.problems
    parameters = [dict(problems[name].module.named_parameters())[key].detach() for name, key in _names(config)]
    return _per_tick(seconds[0], config), parameters


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
def _without_lightning() -> Iterator[None]:
    """Undo what the mere import of Lightning does to every loop in the process.

    It sets a variable that makes torch ask NVML whether there is a GPU, and Adam asks at every step: on a machine
    without one that doubles the step's time. It is part of the tax, so the loops without Lightning must not pay it.
    """
    saved = os.environ.pop(NVML_CHECK, None)
    try:
        yield
    finally:
        if saved is not None:
            os.environ[NVML_CHECK] = saved


@contextmanager
def _stopwatch() -> Iterator[list[Seconds]]:
    found: list[Seconds] = []
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    yield found
    found.append(Seconds(time.perf_counter() - wall, time.process_time() - cpu))


@contextmanager
def _timed_fit() -> Iterator[list[Seconds]]:
    """Time `Trainer.fit`: what summary.json calls training_s, and its CPU time beside it."""
    original, found = pytorch_lightning.Trainer.fit, []

    def fit(*args: Any, **kwargs: Any) -> None:
        with _stopwatch() as seconds:
            original(*args, **kwargs)
        found.extend(seconds)

    pytorch_lightning.Trainer.fit = fit
    try:
        yield found
    finally:
        pytorch_lightning.Trainer.fit = original


def _per_tick(seconds: Seconds, config: Any) -> Seconds:
    return Seconds(seconds.wall / config.runner.max_ticks, seconds.cpu / config.runner.max_ticks)


def _differences(rivals: dict[str, Train], overrides: list[str]) -> dict[str, float]:
    """Return how far each rival's parameters are from the bare loop's, relative to how far those moved.

    The larger one of the two problems' distances. Ends the program where the rivals do different work.
    """
    short = [f"runner.max_ticks={CHECKED_TICKS}", f"evaluate.splits.val={CHECKED_TICKS}"]
    config = mlotool.compose("mwn", [*overrides, *short])
    names = [name for name, _ in _names(config)]
    problems = _build(config).program.problems
    start = [dict(problems[name].module.named_parameters())[key].detach() for name, key in _names(config)]
    ends = {name: train(config)[1] for name, train in rivals.items()}

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
            "loop does: no times are reported. Bring train_by_hand or PINNED up to date."
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
    rivals: dict[str, Train] = {
        BASE: train_by_hand,
        "Schedule.tick": train_by_schedule,
        "mlotool.run": train_by_run,
    }
    differences = _differences(rivals, overrides)
    found: dict[str, list[Seconds]] = {name: [] for name in rivals}
    for _ in range(arguments.rounds):
        for name, train in rivals.items():
            found[name].append(train(config)[0])
    content = {
        **where,
        "mlotool": mlotool.__version__,
        "recipe": "mwn",
        "overrides": overrides,
        "num_rounds": arguments.rounds,
        "against_bare_loop": {clock: summarize(found, BASE, clock) for clock in ("cpu", "wall")},
        "against_schedule": {clock: summarize(found, "Schedule.tick", clock) for clock in ("cpu", "wall")},
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
