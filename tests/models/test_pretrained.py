"""Models of Hugging Face with LoRA adapters: what trains, their hypergradient, what is saved."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlotool import Graph, Problem, Program, Schedule, Stream, Unrolled
from mlotool.core.errors import ConfigError
from mlotool.models import MixtureWeights, PretrainedCausalLM, PretrainedClassifier
from mlotool.models.pretrained import with_lora

GPT2 = {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 2}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LORA = {"r": 2, "lora_alpha": 4, "target_modules": "all-linear"}
RATE = 0.5


def _model(pretrained: Path | None = None, lora: dict[str, Any] | None = None) -> PretrainedCausalLM:
    for package in ("transformers", *(["peft"] if lora else [])):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = PretrainedCausalLM(str(pretrained) if pretrained else None, 11, 6, None if pretrained else GPT2, lora)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which is 0 at first, so that A has no gradient
            nn.init.normal_(parameter, std=0.1)
    return model


def _tokens(seed: int) -> Tensor:
    return torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(seed))


def _lower(batch: Tensor, *, model: Any, mixture: Any) -> Tensor:
    losses = model.method("losses", batch[:, :-1], batch[:, 1:]).mean(dim=1)
    return (mixture() * losses).sum()


def _upper(batch: Tensor, *, model: Any) -> Tensor:
    return model.method("losses", batch[:, :-1], batch[:, 1:]).mean()


def test_adapters_are_trained_below_learned_weights_as_autograd_says() -> None:
    model = _model(lora=LORA).double()
    adapters = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert adapters
    assert all("lora_" in name for name in adapters)
    frozen = {name: tensor.clone() for name, tensor in model.named_parameters() if name not in adapters}
    mixture, (first, second) = MixtureWeights(4).double(), (_tokens(1), _tokens(2))

    def losses(at: dict[str, Tensor], batch: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, at, (batch[:, :-1],))
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(dim=1)

    slopes = torch.autograd.grad((mixture() * losses(adapters, first)).sum(), [*adapters.values()], create_graph=True)
    stepped = {name: each - RATE * slope for (name, each), slope in zip(adapters.items(), slopes, strict=True)}
    [meta] = torch.autograd.grad(losses(stepped, second).mean(), [mixture.logits])
    expected = {name: each.detach() for name, each in stepped.items()}

    sgd = partial(torch.optim.SGD, lr=RATE)
    roles = {"model": "model", "mixture": "mixture"}
    lower = Problem("model", model, _lower, roles=roles, stream=Stream(first, 4, shuffle=False), optimizer=sgd,
                    hypergradient=Unrolled())  # fmt: skip
    upper = Problem("mixture", mixture, _upper, roles={"model": "model"}, stream=Stream(second, 4, shuffle=False),
                    optimizer=sgd)  # fmt: skip
    Schedule(Program([lower, upper], Graph({"mixture": ["model"]}, {"model": ["mixture"]}))).tick()
    after = dict(model.named_parameters())
    torch.testing.assert_close({name: after[name].detach() for name in expected}, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mixture.logits.detach(), -RATE * meta, rtol=1e-8, atol=1e-12)
    assert bool(meta.abs().max() > 1e-5)
    assert all(torch.equal(after[name], value) for name, value in frozen.items())


def test_what_is_saved_is_what_hugging_faces_libraries_read(tmp_path: Path) -> None:
    plain, tokens = _model().eval(), _tokens(3)[:, :6]
    plain.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    transformers = pytest.importorskip("transformers")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    torch.testing.assert_close(read(tokens).logits, plain(tokens))

    tuned, peft = _model(tmp_path / "base", LORA).eval(), pytest.importorskip("peft")
    assert not torch.allclose(tuned(tokens), plain(tokens))
    tuned.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("model*"))
    assert (tmp_path / "adapter" / "tokenizer.json").read_text() == "{}"
    read = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    torch.testing.assert_close(read(tokens).logits, tuned(tokens))
    tuned.save_pretrained(tmp_path / "merged", merge=True)
    torch.testing.assert_close(_model(tmp_path / "merged").eval()(tokens), tuned(tokens))
    # Random weights are nowhere else.
    made = _model(lora=LORA).eval()
    made.save_pretrained(tmp_path / "made")
    torch.testing.assert_close(_model(tmp_path / "made").eval()(tokens), made(tokens))


def test_a_classifier_with_its_own_head() -> None:
    pytest.importorskip("peft")
    bert = {"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = PretrainedClassifier(None, 3, 30, 12, {**bert, "intermediate_size": 16}, {"r": 2}).eval()
    trained = [name for name, each in model.named_parameters() if each.requires_grad]
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained if "lora" in name} == {"query", "value"}
    assert [name for name in trained if "lora" not in name and "classifier" not in name] == []
    tokens = torch.tensor([[5, 7, 3], [2, 9, 4]])
    torch.testing.assert_close(model(tokens), model(nn.functional.pad(tokens, (0, 4))))  # padding has no say
    assert model(tokens).shape == (2, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": {"model_type": "gpt7"}}, r"config\.model_type: found 'gpt7'; expected a model of transformers"),
        ({"config": {"model_type": "gpt2", "n_layers": 2}}, r"config: found 'n_layers'; .* Did you mean 'n_layer'\?"),
        ({"config": {"model_type": "gpt2", "auto_map": {"AutoModel": "x--y.Z"}}}, r"config: found 'auto_map'"),
        ({"config": {**GPT2, "n_head": 3}}, r"no model could be made"),
        ({"config": {**GPT2, "n_positions": 5}}, r"length: found 6; expected at most 5, as the model of config has"),
        ({"config": GPT2, "lora": {"r": 2, "target_modules": ["nothing"]}}, r"expected modules that the model has"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    for package in ("transformers", *(["peft"] if "lora" in settings else [])):
        pytest.importorskip(package)
    with pytest.raises(ConfigError, match=message):
        PretrainedCausalLM(None, 11, 6, **settings)


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What holds without them, by a stand-in of peft."""
    made: list[Any] = []
    package = ModuleType("peft")
    package.LoraConfig = lambda **settings: SimpleNamespace(**settings)  # type: ignore[attr-defined]
    package.get_peft_model = lambda model, config: made.append(config) or model  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setitem(sys.modules, "peft", package)
    model = nn.Linear(1, 1)
    assert with_lora(model, {"r": 4, "target_modules": ("q", "v")}, "CAUSAL_LM", "abc") is model
    assert vars(made[0]) == {"task_type": "CAUSAL_LM", "revision": "abc", "r": 4, "target_modules": ["q", "v"]}
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"lora=.* needs peft, which is not installed.*pip install 'mlotool\[peft\]'"):
        with_lora(model, {"r": 4}, "CAUSAL_LM")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"config needs transformers, which is not installed"):
        PretrainedCausalLM(None, 11, 6, GPT2)
    with pytest.raises(
        ConfigError, match=r"PretrainedCausalLM\.lora: found \{rank: 4\}; expected \{r: \.\., lora_alpha"
    ):
        PretrainedCausalLM(None, 11, 6, GPT2, {"rank": 4})  # type: ignore[typeddict-item, typeddict-unknown-key]
    with pytest.raises(ConfigError, match=r"pretrained: found None; expected .*, or config beside null"):
        PretrainedCausalLM(None, 11, 6)
