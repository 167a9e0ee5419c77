"""Errors of code that is not mlotool's, and what such code changes for a whole process."""

from collections import OrderedDict
from functools import partial

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack as modes

from mlotool.core import user_code
from mlotool.core.errors import ConfigError
from mlotool.core.messages import described, kind_of
from mlotool.core.unchanged import restore_torch_settings, torch_settings
from mlotool.core.user_code import Call, UserCodeError, explained, is_users, noted, user_frame


def _fail() -> None:
    raise KeyError("column")


def test_an_exception_of_the_users_has_its_deepest_frame() -> None:
    where = r"Tick 3: .*test_user_code.py, line \d+, in _fail: KeyError: 'column'"
    with pytest.raises(UserCodeError, match=where) as caught, user_code.user_code(prefix=lambda: "Tick 3: "):
        _fail()
    assert isinstance(caught.value.__cause__, KeyError)


def test_the_innermost_call_is_told() -> None:
    inner = partial(Call, "loss", partial(_fail), {"batch": 3}, "much")
    message = r"loss: .*_fail \(.*line \d+\) failed .* given batch = 3. Expected much."
    with (
        pytest.raises(ConfigError, match=message),
        user_code.user_code(ConfigError),
        noted(partial(Call, "outer", _fail)),
        noted(inner),
    ):
        _fail()


def test_errors_of_mlotool_and_of_libraries_pass() -> None:
    with pytest.raises(ConfigError, match=r"^mine$"), user_code.user_code():
        raise ConfigError("mine")
    with pytest.raises(RuntimeError) as caught:
        torch.zeros(2) @ torch.zeros(3)
    # The frame of this test is no part of mlotool; without it there is none of the user's.
    assert user_frame(caught.value) is not None
    caught.value.__traceback__ = None
    assert explained(caught.value) is None


def test_whose_code_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_users(torch.__file__, "torch")
    assert not is_users(ConfigError.__module__, "mlotool.core.errors")
    assert not is_users("<frozen importlib._bootstrap>", "importlib._bootstrap")
    assert is_users("/home/me/models.py", "models")
    installed = "/usr/lib/python3/site-packages/mine/a.py"
    assert not is_users(installed, "mine.a")
    monkeypatch.setattr(user_code, "_packages", {"mine"})
    assert is_users(installed, "mine.a")


def test_batches_in_words() -> None:
    batch = {"x": torch.zeros(2, 3), "n": [1, "a"], "y": torch.tensor([4, 7]), "z": torch.tensor([float("inf")])}
    text = "{x: float32 (2, 3), n: a list of 2: [1, 'a'], y: int64 (2,) from 4 to 7, z: float32 (1,), not all finite}"
    assert described(batch) == text
    assert described({number: number for number in range(20)}).endswith("7: 7, ...}")
    kinds = [kind_of(each) for each in (None, 1.0, OrderedDict(a=1), torch.zeros(2))]
    assert kinds == ["None", "a float", "a OrderedDict with the keys a", "a tensor of shape (2,)"]


@pytest.mark.parametrize(
    ("before", "changed"), [(None, "meta"), (None, "cpu"), ("meta", "cpu"), ("cpu", "meta"), ("cpu", None)]
)
def test_the_default_device_is_put_back(before: str | None, changed: str | None) -> None:
    """No default device is another state than the CPU: with one, each call passes through a mode of torch's."""
    try:
        torch.set_default_device(before)
        kinds, settings = list(map(type, modes())), torch_settings()
        torch.set_default_device(changed)
        assert restore_torch_settings(settings) == ["torch.set_default_device"]
        assert torch_settings() == settings
        assert list(map(type, modes())) == kinds
    finally:
        torch.set_default_device(None)
