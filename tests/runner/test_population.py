"""Runs that copy each other, and settings that change while a run trains."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mlotool import Graph, Problem, Program
from mlotool.config.sweeps.population import Population, Rules
from mlotool.config.sweeps.sweep_plan import Dimension
from mlotool.core.errors import ConfigError
from mlotool.folders.run_folder import RunFolder
from mlotool.folders.sweep_folder import SweepFolder
from mlotool.runner import population
from mlotool.runner.changes import Changes, set_settings
from mlotool.runner.together import run_together
from tests.runner.test_together import request

LR = "problems.classifier.optimizer.lr"
WORDS = ("runner.max_ticks=6", "evaluate.splits.val=1", "runner.checkpoint_seconds=1000", "data.sizes.val=50")
RATES = (0.5, 0.001, 0.05)


def train(folder: Path) -> None:
    """Train three members, or go on with them; whether they are one program is not a matter of time."""
    requests = []
    for number, rate in enumerate(RATES):
        summary = RunFolder(folder / str(number)).summary()
        ended_at = summary["num_ticks"] if summary.get("status") == "finished" else None
        own = folder / str(number)
        own.mkdir(parents=True, exist_ok=True)
        requests.append(request(own, *WORDS, f"{LR}={rate}", resume="auto", ended_at=ended_at))
    sweep = SweepFolder(folder)
    if not sweep.has(sweep.POPULATION):
        rules = Rules(interval=2, fraction=0.34, resample=0.0, factor=2.0, seed=0, mode="max")
        dimension = Dimension(LR, low=1e-4, high=1.0, log=True)
        Population(rules, [dimension], [{LR: rate} for rate in RATES]).write(sweep)
    ended: dict[int, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlotool.fusion.stacked_gradients._fastest", lambda take, before: (before(), (0.0, take()))[1])
        run_together(requests, record=folder / "fusion" / "0.json", when_ended=ended.__setitem__, population=sweep)
    assert not any(isinstance(result, BaseException) for result in ended.values()), ended


def losses(folder: Path) -> dict[str, float]:
    return {
        f"{tick:.0f} {key}": value
        for key in ("val/accuracy", "classifier/loss", "classifier/lr")
        for tick, value in RunFolder(folder).metrics()[0][key].items()
    }


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return dict(state["mlotool"]["program"]["classifier"]["module"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    train(folder)
    return folder


def test_one_run_whose_settings_change_is_where_a_member_is(tmp_path: Path, whole: Path) -> None:
    """Each member's last state is that of a run by itself with its schedule, but for the rounding of one program."""
    members = Population.read(SweepFolder(whole))
    assert members is not None and len(members.copies) >= 2 and members.ticks == [2, 4]
    [member, *_] = [copy.member for copy in members.copies[::-1]]
    schedule = members.schedule(member)
    assert len(schedule) >= 2
    trained_by = json.loads((whole / str(member) / "lineage.json").read_text())["trained_by"]
    assert [(part["tick"], part["settings"]) for part in trained_by] == schedule
    (_, first), *later = schedule
    alone = request(tmp_path / "alone", *WORDS, f"{LR}={first[LR]}")
    alone.config.runner.changes = dict(later)
    run_together([alone], record=None, when_ended=lambda place, result: None)
    found, expected = parameters(whole / str(member)), parameters(tmp_path / "alone")
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name
    # Without its changes it would be elsewhere.
    run_together([request(tmp_path / "b", *WORDS, f"{LR}={first[LR]}")], record=None, when_ended=lambda *_: None)
    others = parameters(tmp_path / "b")
    assert not all(torch.allclose(found[name], value, rtol=1e-4, atol=1e-6) for name, value in others.items())


@pytest.mark.parametrize("after_copies", [0, 1])
def test_a_population_that_was_stopped_while_it_exchanged_goes_on_to_the_same_bits(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, after_copies: int
) -> None:
    """Before the exchange, members wait again; after it, their checkpoints have what they copied."""
    direct = population.Exchange.meet
    calls: list[int] = []

    def meeting(self: population.Exchange) -> None:
        calls.append(1)
        if len(calls) > 1:
            return direct(self)
        if after_copies:
            direct(self)
        signal.raise_signal(signal.SIGINT)
        if not after_copies:
            raise KeyboardInterrupt
        return None

    with monkeypatch.context() as patch:
        patch.setattr(population.Exchange, "meet", meeting)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
    assert not any(RunFolder(tmp_path / str(number)).summary().get("status") == "finished" for number in range(3))
    train(tmp_path)
    for number in range(3):
        assert losses(tmp_path / str(number)) == losses(whole / str(number))
        found, expected = parameters(tmp_path / str(number)), parameters(whole / str(number))
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert Population.read(SweepFolder(tmp_path)) == Population.read(SweepFolder(whole))


def program(scheduler: Any = None) -> Program:
    def loss(batch: Any, *, net: Any) -> torch.Tensor:
        return net().square().sum()

    class Point(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(torch.ones(1))

        def forward(self) -> torch.Tensor:
            return self.x

    def optimizer(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)

    return Program(
        [Problem("net", Point(), loss, roles={"net": "net"}, optimizer=optimizer, scheduler=scheduler)], Graph()
    )


def test_a_rate_that_changes_keeps_what_its_scheduler_has_made_of_it() -> None:
    changed = program(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
    net = changed.problems["net"]
    assert net.optimizer is not None
    net.optimizer.step()
    net.scheduler.step()
    set_settings(changed, {"problems.net.optimizer.lr": 0.2, "problems.net.optimizer.momentum": 0.9})
    group = net.optimizer.param_groups[0]
    assert (group["lr"], group["momentum"]) == (0.1, 0.9)
    net.scheduler.step()
    assert group["lr"] == 0.05


def test_what_cannot_change_is_told_before_the_first_tick() -> None:
    with pytest.raises(ConfigError, match=r"expected one of problems\.net\.optimizer\.lr, problems\.net"):
        Changes(program(), {3: {"problems.net.module.width": 4}})
    with pytest.raises(ConfigError, match=r"problems\.net\.optimizer\.lr: found -1 in runner"):
        set_settings(program(), {"problems.net.optimizer.lr": -1})
