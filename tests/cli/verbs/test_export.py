"""`mlotool export`: the files, the card, and that the weights are those of the module."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mlotool.core.errors import ConfigError
from mlotool.report.model_card import model_card
from mlotool.runner import exporting
from tests.cli.conftest import Call
from tests.report.run_folders import mwn_config, write_run


class Tied(nn.Module):
    """Two names of one tensor, a view of a larger one, a buffer of whole numbers, and bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.narrow = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.norm = nn.BatchNorm1d(3)
        self.small = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))


class Hub(nn.Linear):
    """As those of Hugging Face's."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder, "config.json").write_text(json.dumps({"architectures": ["HubModel"]}))


class Odd(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"count": 1}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of mwn, whose classifier is a multilayer perceptron of 64 inputs."""
    config = mwn_config()
    config["problems"]["classifier"]["module"] |= {"image_shape": [1, 8, 8], "num_classes": 10, "hidden": [16]}
    config["data"] = {"_target_": "mlotool.data.Digits"}
    return write_run(tmp_path / "run", config=config, recipe="# @package _global_\n# Weights\n# of samples.\n")


def read_by_hand(file: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return dtype, shape and bytes by name: eight bytes have the length of a header of JSON, then come the tensors."""
    content = file.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__")
    return {name: (x["dtype"], x["shape"], body[slice(*x["data_offsets"])]) for name, x in header.items()}


def test_every_tensor_is_written_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    module = Tied()
    monkeypatch.setattr(exporting, "load", lambda *_, **__: module)
    assert exporting.export("run", "x", tmp_path / "out") is module
    found, state = read_by_hand(tmp_path / "out" / "model.safetensors"), module.state_dict()
    assert set(found) == set(state) and {"first.weight", "second.weight"} < set(found)
    for name, (_, shape, content) in found.items():
        tensor = state[name].contiguous()
        assert shape == list(tensor.shape)
        assert content == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert {name: kind for name, (kind, _, _) in found.items() if kind != "F32"} == {
        "small": "BF16", "norm.num_batches_tracked": "I64",
    }  # fmt: skip


def test_a_module_that_saves_itself_does_so_and_odd_states_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "load", lambda *_, **__: Hub(2, 2))
    exporting.export("run", "x", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    monkeypatch.setattr(exporting, "load", lambda *_, **__: Odd(2, 2))
    with pytest.raises(ConfigError, match="found '_extra_state' in its state"):
        exporting.export("run", "x", tmp_path)


def test_the_command_writes_a_folder_that_loads_by_its_own_card(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors")
    from mlotool.models import MLP

    module = MLP(image_shape=[1, 8, 8], num_classes=10, hidden=[16])
    monkeypatch.setattr(exporting, "load", lambda *_, **__: module)
    code, out, err = call("export", str(run))
    assert code == 0 and out == "export/mwn_classifier\n", err
    folder = tmp_path / "export" / "mwn_classifier"
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.yaml",
        "model.safetensors",
        "recipe.yaml",
    ]
    assert (folder / "model.safetensors").stat().st_mode == (folder / "README.md").stat().st_mode
    code, _, err = call("evaluate", str(folder), "--split", "test")
    assert code == 2 and "is an export, without checkpoints" in err
    card = (folder / "README.md").read_text()
    assert "# mwn: classifier" in card and "after tick 800 of 1000" in card and "1,210 parameters" in card
    assert "| val/accuracy (objective, larger is better) | 0.9371 | 800 |" in card
    assert "the upper problem reweight shaped its training" in card
    [source] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(source, names)
    inputs = torch.rand(5, 1, 8, 8)
    assert torch.equal(names["model"](inputs), module(inputs))
    monkeypatch.chdir(tmp_path)
    assert call("export", str(run))[0] == 2
    assert "expected one of reweight, classifier" in call("export", str(run), "--problem", "x", "--out", "new")[2]
    assert call("export", str(tmp_path), "--out", "new")[0] == 2 and not (tmp_path / "new").exists()


def set_command(run: Path, command: str) -> None:
    record = json.loads((run / "provenance.json").read_text())
    (run / "provenance.json").write_text(json.dumps({**record, "command": command}))


def test_the_card_of_a_sweeps_job_has_its_own_command(run: Path, tmp_path: Path) -> None:
    (run / "overrides.txt").write_text("+recipe=rings\nseed=1\nsweep.num_trials=8\n")
    set_command(run, "mlotool run -m rings.yaml --trust rings seed=0,1 sweep.num_trials=8")
    card = model_card(run, "classifier", tmp_path, "best", 1)
    assert "\nmlotool run --trust rings rings.yaml seed=1\n" in card
    assert """`mlotool.load("RUN", "classifier", "best", trust=['rings'])`""" in card


def test_a_strangers_folder_writes_no_markup_and_ends_no_block(run: Path, tmp_path: Path) -> None:
    (run / "recipe.yaml").write_text("# @package _global_\n# <img src=x> [a](javascript:x) `b` | c\n")
    set_command(run, "mlotool run x\n```\n<script>")
    card = model_card(run, "classifier", tmp_path, "best", 1)
    assert "<img" not in card and "[a]" not in card and card.count("```") == 6
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "BertModel.from_pretrained(" in model_card(run, "classifier", tmp_path, "best", 1)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b", "task_type": "SEQ_CLS"}')
    card = model_card(run, "classifier", tmp_path, "last", 1)
    assert (
        "base_model: a/b" in card
        and 'AutoPeftModelForSequenceClassification.from_pretrained("FOLDER", num_labels=10)' in card
        and "| val/accuracy (objective, larger is better) | 0.9" in card
    )
    assert "at the last checkpoint" in card
