"""The one layer of exchanges: what is packed, what is said of a lost process, and that nobody else exchanges."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import mlotool.distributed
from mlotool.core.errors import RunError
from mlotool.core.user_code import Call, UserCodeError, noted, user_code
from mlotool.distributed.collectives import Ranks, begin_exchange, naming_the_lost

ROOT = Path(mlotool.distributed.__file__).parents[1]

ALLOWED = {"runner/run_config.py", "problem/shards.py", "problem/problem.py"}
"""Ranks that join, FSDP2 and what it needs of tensors in shards."""


def test_nobody_else_exchanges() -> None:
    exchange = re.compile(
        r"^\s*(from|import) torch\.distributed|from torch import distributed|torch\.distributed\.\w+\(", re.M
    )
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if exchange.search(path.read_text())}
    assert {name for name in found if not name.startswith("distributed/")} == ALLOWED, "Put it into distributed/."
    assert {"distributed/collectives.py"} <= found


def test_all_exchanges_are_under_way_before_the_first_one_is_waited_for() -> None:
    seen = []

    def begin(flat: Tensor) -> Callable[[], object]:
        seen.append("begin")
        flat.add_(1)
        return lambda: seen.append("wait")

    tensors = [torch.ones(1, 2, requires_grad=True), torch.tensor(3), torch.empty(0), torch.ones(2)]
    found = begin_exchange(tensors, begin)()
    assert seen == ["begin"] * 2 + ["wait"] * 2
    assert [each.tolist() for each in found] == [[[2.0, 2.0]], 4, [], [2.0, 2.0]]
    assert tensors[0].tolist() == [[1.0, 1.0]]


def test_a_lost_process_is_named() -> None:
    def fail(error: Exception) -> None:
        with naming_the_lost("rank", 1, 3):
            raise error

    with pytest.raises(RunError, match=r"^Rank 1 has lost the process of rank 3 \(Connection closed\); expected it"):
        fail(RuntimeError("Connection closed. At some line"))
    with pytest.raises(KeyError):
        fail(KeyError("another error stays"))


RESET = "[/pair.cc:561] Connection reset by peer [127.0.0.1]:1. This is typically caused by a remote worker"
COLLECTIVES: dict[str, tuple[str, Callable[[Ranks], object]]] = {
    "mean": ("all_reduce", lambda ranks: ranks.mean([torch.ones(2)])),
    "largest": ("all_reduce", lambda ranks: ranks.largest([1.0])),
    "first": ("broadcast_object_list", lambda ranks: ranks.first("text")),
    "gather": ("all_gather_object", lambda ranks: ranks.gather("text")),
    "gather_tensors": ("all_gather", lambda ranks: ranks.gather_tensors(torch.ones(2))),
    "gather_flat": ("all_gather_into_tensor", lambda ranks: ranks.gather_flat(torch.ones(2))),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_lost_rank_is_no_fault_of_the_code_that_waited_for_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The mean of a gradient is taken within a call that is noted as the user's."""
    function, call = COLLECTIVES[name]

    def fail_with(text: str) -> None:
        def fail(*_: object, **__: object) -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(torch.distributed, function, fail)
        with user_code(), noted(lambda: Call("problems.weights", "its gradient")):
            call(Ranks(1, 2))

    with pytest.raises(
        RunError, match=r"^Rank 1 has lost the process of another rank \(.*Connection reset by"
    ) as found:
        fail_with(RESET)
    assert not isinstance(found.value, UserCodeError)
    with pytest.raises(UserCodeError, match=r"its gradient failed .*RuntimeError: sizes differ"):
        fail_with("sizes differ")


def test_one_rank_talks_to_nobody() -> None:
    alone, tensors = Ranks(), [torch.ones(2, requires_grad=True)]
    assert alone.mean(tensors) is tensors
    assert alone.largest([1.0, 2.0]) == [1.0, 2.0]
    assert alone.of_first(lambda: 3) == 3
    assert alone.total(tensors[0]).tolist() == alone.gather_tensors(tensors[0])[0].tolist() == [1.0, 1.0]
    assert alone.broadcast_one(tensors[0], 0).tolist() == alone.gather_rows(tensors)[0].tolist() == [1.0, 1.0]
