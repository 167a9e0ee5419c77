from pathlib import Path

import pytest
import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.models import Anchored, PositiveVector, torchvision_model


def test_anchored_remembers_its_start() -> None:
    layer = nn.Linear(3, 2)
    first = [tensor.detach().clone() for tensor in layer.parameters()]
    anchored = Anchored(layer)
    with torch.no_grad():
        layer.weight.add_(1.0)
    assert all(map(torch.equal, anchored.start(), first))
    assert [name for name, _ in anchored.named_parameters()] == ["module.weight", "module.bias"]
    x = torch.randn(4, 3)
    assert torch.equal(anchored(x), layer(x))
    # A resumed run keeps the first start.
    other = Anchored(nn.Linear(3, 2))
    other.load_state_dict(anchored.state_dict())
    assert all(map(torch.equal, other.start(), first))


def test_positive_vectors_start_where_they_are_told_and_stay_positive() -> None:
    vector = PositiveVector(3, initial=0.2)
    torch.testing.assert_close(vector(), torch.full((3,), 0.2))
    with torch.no_grad():
        vector.logarithm.sub_(20.0)
    assert (vector() > 0).all()
    for settings in ({"size": 0}, {"initial": 0.0}, {"initial": float("nan")}):
        with pytest.raises(ConfigError, match=r"PositiveVector.*: found"):
            PositiveVector(**settings)  # type: ignore[arg-type]


def test_torchvision_parameters_come_from_a_file_but_for_the_last_layer(tmp_path: Path) -> None:
    given = torchvision_model("squeezenet1_1", 5)
    torch.save(given.state_dict(), tmp_path / "given.pth")
    model = torchvision_model("squeezenet1_1", 7, parameters_file=str(tmp_path / "given.pth"))
    expected, found = given.state_dict(), model.state_dict()
    assert {key for key in found if not torch.equal(found[key], expected[key])} == {
        "classifier.1.weight",
        "classifier.1.bias",
    }
    with pytest.raises(ConfigError, match=r"has .* of the .* tensors of resnet18"):
        torchvision_model("resnet18", 7, parameters_file=str(tmp_path / "given.pth"))
    (tmp_path / "bad.pth").write_bytes(b"no")
    with pytest.raises(ConfigError, match=r"bad\.pth could not be read"):
        torchvision_model("squeezenet1_1", 7, parameters_file=str(tmp_path / "bad.pth"))
