"""In the user's own code: numbers, states and gradients that torch takes, and a training does not."""
# ruff: noqa: E501 - what is said stands in one line

from tests.cli.mistakes.in_code import (
    CROSS_ENTROPY,
    P,
    _analysis,
    _code,
    _data,
    _item,
    _loss,
    _metric,
    _module,
    _optimizer,
)
from tests.cli.mistakes.mistake import Mistake

FORWARD = "def forward(self, x):\n        "
OUTPUT = "from mlotool import LossOutput\n"
COUNTED = f"{OUTPUT}calls = 0\n\n\n"
MEANT = "def __init__(self):\n        super().__init__()\n        "
BILEVEL = """\
class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return torch.sigmoid(self.weight * x)


def upper(batch, *, model):
    return F.cross_entropy(model(batch["input"]), batch["target"])


def lower(batch, *, model, up):
    losses = F.cross_entropy(model(batch["input"]), batch["target"], reduction="none")
    return (up(losses.detach()) * losses).mean()
"""
TWO = """\
# @package _global_
# Two problems of a user's package.
defaults: [_self_, override /data: null]
name: mine
data: {_target_: mypackage.data.Data}
problems:
  classifier:
    module: {_target_: mypackage.models.Net}
    loss: {_target_: slip.lower, roles: {model: classifier, up: u}}
    hypergradient: {_target_: mlotool.hypergradient.Implicit, solver: {_target_: mlotool.hypergradient.ConjugateGradient}}
    stream: {split: train, batch_size: 8}
    optimizer: {_target_: torch.optim.SGD, lr: 0.1}
  u:
    module: {_target_: slip.Up}
    loss: {_target_: slip.upper, roles: {model: classifier}}
    stream: {split: train, batch_size: 8}
    optimizer: {_target_: torch.optim.SGD, lr: 0.1}
graph:
  upper_to_lower: {u: [classifier]}
  lower_to_upper: {classifier: [u]}
evaluate: {problem: classifier, metrics: [accuracy], splits: {val: 2}}
objective: val/accuracy
runner: {max_ticks: 2, report: false, accelerator: cpu}
logger: {wandb: false}
"""


def _later(result: str, says: str) -> Mistake:
    """A loss that returns something else from its third call on; the rehearsal's is not counted."""
    body = f"global calls\n    calls += 1\n    loss = {CROSS_ENTROPY}\n    return {result} if calls > 2 else loss"
    says = f"After tick 2: problems.classifier.loss: slip.loss (slip/__init__.py, line 11) returned {says}"
    source = f"{COUNTED}def loss(batch, *, model):\n    {body}"
    return _code(source, f"{P}loss._target_=slip.loss", "runner.max_ticks=5", says=(says,), code=1, has_run=True)


def _two(source: str, *says: str) -> Mistake:
    given = _code(source, says=says)
    words = ("run", "two.yaml", *given.words[2:])
    return Mistake(words, says, 2, {**given.files, "two.yaml": TWO})


def _state(source: str, *says: str, key: str = "optimizer", at_build: bool = True) -> Mistake:
    """A state that no checkpoint can hold, which shows when the run is built, or after a step."""
    node = "optimizer._target_=slip.Mine" if key == "optimizer" else "scheduler={_target_: slip.Mine}"
    return _code(source, f"{P}{node}", says=says, code=2 if at_build else 1, has_run=not at_build)


def _batches(result: str, *says: str) -> Mistake:
    body = "class Whole(Dicts):\n            def __getitems__(self, indices):\n                "
    return _data(f"def split(self, name):\n        {body}{result}\n        return Whole(*samples())", *says)


SGD = "class Mine(torch.optim.SGD):\n    "
STEP = f"{SGD}def step(self, closure=None):\n        super().step()\n        "
SCHEDULER = "class Mine(torch.optim.lr_scheduler.LRScheduler):\n    "
MISTAKES = {
    # losses
    "a batch unpacked as a pair": _loss(
        "x, y = batch\n    return F.cross_entropy(model(x), y)",
        "ValueError: too many values to unpack",
        "A batch is a dict: take batch['input'] and batch['target']",
    ),
    "a batch by position": _loss(
        "return model(batch[0]).sum()", "KeyError: 0", "A batch is a dict: take batch['input']"
    ),
    "a module that is given the whole batch": _loss(
        "return model(batch).sum()",
        "'dict' object has no attribute 'flatten'",
        "A batch is a dict: take batch['input']",
    ),
    "logits and targets swapped": _loss(
        'return F.cross_entropy(batch["target"], model(batch["input"]))',
        "not implemented for 'Long'",
        "look at the arguments' order",
    ),
    "a batch moved to CUDA": _loss(
        'return model(batch["input"].to("meta")).sum()',
        "is not on the expected device",
    ),
    "a role through functional_call": _loss(
        'return torch.func.functional_call(model, dict(model.named_parameters()), (batch["input"],)).sum()',
        "unexpected keyword argument 'remove_duplicate'",
    ),
    "autograd.grad without create_graph": _loss(
        f"loss = {CROSS_ENTROPY}\n    torch.autograd.grad(loss, list(model.parameters()))\n    return loss",
        "backward through the graph a second time",
        "give torch.autograd.grad create_graph=True",
    ),
    "a sum over the losses so far": _code(
        f"seen = []\n\n\ndef loss(batch, *, model):\n    seen.append({CROSS_ENTROPY})\n    return sum(seen)",
        f"{P}loss._target_=slip.loss",
        says=("After tick 1: problems.classifier: its gradient failed", "for its next call it keeps as .detach()"),
        code=1,
        has_run=True,
    ),
    "a loss that is kept": _code(
        f"seen = []\n\n\ndef loss(batch, *, model):\n    seen.append({CROSS_ENTROPY})\n    return seen[0]",
        f"{P}loss._target_=slip.loss",
        says=("problems.classifier: its gradient failed", "Trying to backward through the graph a second time"),
        code=1,
        has_run=True,
    ),
    "gradients left off": _loss(
        f"loss = {CROSS_ENTROPY}\n    torch.set_grad_enabled(False)\n    return loss",
        "returned its loss, and torch.set_grad_enabled changed for all that follows",
        "Use a context",
    ),
    "another default dtype": _loss(
        f"torch.set_default_dtype(torch.float64)\n    return {CROSS_ENTROPY}",
        "returned its loss, and torch.set_default_dtype changed",
    ),
    "another default device": _loss(
        f"torch.set_default_device('meta')\n    return {CROSS_ENTROPY}",
        "returned its loss, and torch.set_default_device changed",
    ),
    "a loss times zero": _loss(
        f"return 0 * {CROSS_ENTROPY}",
        "warning: problems.classifier.loss: the gradient of slip.loss (slip/__init__.py, line 7) is exactly 0 at its",
        code=0,
        has_run=True,
    ),
    "the root of zero": _loss(
        f'return {CROSS_ENTROPY} + (0 * model(batch["input"])).sqrt().sum()',
        "returned a loss whose gradient is not finite before the first step",
        "Look for sqrt, norm, log or a division at zero",
    ),
    "a complex metric of a loss": _loss(
        f'return LossOutput({CROSS_ENTROPY}, {{"a": torch.tensor(1j)}})',
        "as the metric 'a'; expected dense real 0-D tensors",
        before=OUTPUT,
    ),
    "a metric of a loss without values": _loss(
        f'return LossOutput({CROSS_ENTROPY}, {{"a": torch.ones((), device="meta")}})',
        "as the metric 'a'; expected dense real 0-D tensors",
        before=OUTPUT,
    ),
    "a sparse metric of a loss": _loss(
        f'return LossOutput({CROSS_ENTROPY}, {{"a": torch.ones(1).to_sparse()}})',
        "as the metric 'a'; expected dense real 0-D tensors",
        before=OUTPUT,
    ),
    "metrics by a function of an argument": _loss(
        f"return LossOutput({CROSS_ENTROPY}, lambda batch: {{}})",
        "slip.loss (slip/__init__.py, line 8) failed: TypeError",
        before=OUTPUT,
    ),
    "metrics that become a list": _later("LossOutput(loss, [1])", "a list as metrics; expected a dict"),
    "a metric that becomes a vector": _later(
        "LossOutput(loss, {'a': torch.ones(3)})", "a tensor of shape (3,) as the metric 'a'; expected dense real 0-D"
    ),
    "a metric that becomes a text": _later(
        "LossOutput(loss, {'a': 'b'})", "a str as the metric 'a'; expected dense real 0-D"
    ),
    "a loss that becomes complex": _later("loss * 1j", "a complex number; expected a real one"),
    "a lower loss that draws from numpy": _two(
        f"import numpy\n\n{BILEVEL}".replace("return (up", "return numpy.random.rand() * (up"),
        "problems.classifier.loss: slip.lower",
        "for the same batch, parameters and random numbers of torch; expected the same value",
        "Draw by torch's own generator",
    ),
    "a lower loss with a generator of its own": _two(
        f"g = torch.Generator()\n\n{BILEVEL}".replace("return (up", "return torch.rand((), generator=g) * (up"),
        "for the same batch, parameters and random numbers of torch; expected the same value",
    ),
    "a lower loss that counts its calls": _two(
        BILEVEL.replace("def lower", "n = [0]\n\n\ndef lower").replace(
            "return (up", "n[0] += 1\n    return n[0] * (up"
        ),
        "expected the same value, since a hypergradient evaluates a loss many times",
        "no value that a call leaves behind",
    ),
    # modules
    "a batch of one sample with BatchNorm": _code(
        f"class Mine(Net):\n    {MEANT}self.norm = nn.BatchNorm1d(10)\n\n    {FORWARD}return self.norm(super().forward(x))",
        f"{P}module._target_=slip.Mine",
        f"{P}stream.batch_size=1",
        says=("Expected more than 1 value per channel",),
    ),
    "a layer that is made in each forward": _module(
        f"{FORWARD}return nn.Linear(10, 10)(super().forward(x))",
        "depends on a parameter of shape (10, 10) which no problem trains",
        "Make layers in a module's __init__",
    ),
    "a parameter that is made anew in each forward": _module(
        f"{FORWARD}self.layer.weight = nn.Parameter(self.layer.weight / 2)\n        return super().forward(x)",
        "depends on a parameter of shape (10, 64) which no problem trains",
    ),
    "a buffer that keeps its graph": _code(
        f"class Mine(Net):\n    {MEANT}self.register_buffer('mean', torch.zeros(10))\n\n    {FORWARD}"
        "y = super().forward(x)\n        self.mean = self.mean + y.mean(0)\n        return y + self.mean",
        f"{P}module._target_=slip.Mine",
        says=("After tick 1: problems.classifier: its gradient failed", "for its next call it keeps as .detach()"),
        code=1,
        has_run=True,
    ),
    "a backward that gives nan": _module(
        f"{FORWARD}return Bad.apply(super().forward(x))",
        "returned a loss whose gradient is not finite before the first step",
        before="class Bad(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x.clone()\n\n"
        "    @staticmethod\n    def backward(ctx, gradient):\n        return gradient * float('nan')\n\n\n",
    ),
    "a module that saves nothing": _module(
        "def state_dict(self, *args, **settings):\n        return {}",
        "expected all parameters in the state_dict() of slip.Mine (slip/__init__.py, line 7)",
    ),
    "a module that does not load": _module(
        "def load_state_dict(self, *args, **settings):\n        raise OSError('no file')",
        "does not save and load its state (OSError: no file); expected that it loads what it has saved",
    ),
    "an extra state without its counterpart": _module(
        "def get_extra_state(self):\n        return 3", "does not save and load its state", "and set_extra_state"
    ),
    "an extra state that is an object": _code(
        "class Mine(Net):\n    def get_extra_state(self):\n        return object()\n\n    def set_extra_state(self, state):\n        pass",
        f"{P}module._target_=slip.Mine",
        says=(
            "problems.classifier.module: its state_dict() holds an object, of class builtins.object, at '_extra_state'",
        ),
        code=2,
    ),
    # data
    "keys that change by index": _item(
        'return {"input" if index % 2 else "image": self.inputs[index], "target": 0}',
        "Let __getitem__ return the same form at each index",
    ),
    "kinds that change by index": _item(
        'return {"input": self.inputs[index], "target": 0 if index % 2 else self.targets[index]}',
        "Let __getitem__ return the same form at each index",
    ),
    "sparse samples": _item(
        'return {"input": self.inputs[index].to_sparse(), "target": 0}',
        "Let __getitem__ return the same form at each index",
    ),
    "samples with a gradient in a loading process": _item(
        'return {"input": self.inputs[index].requires_grad_() * 2, "target": 0}',
        "without gradients",
        words=(f"{P}stream.num_workers=1",),
    ),
    "samples that are tensors alone": _item(
        "return self.inputs[index]",
        "It was given batch = float32 (8, 1, 8, 8)",
    ),
    "one infinite sample": _code(
        "class Items(Dicts):\n    def __getitem__(self, index):\n        sample = super().__getitem__(index)\n"
        "        return {**sample, 'input': sample['input'] / (0 if index == 7 else 1)}\n\n\n"
        "class Mine(Data):\n    def split(self, name):\n        return Items(*samples())",
        "data._target_=slip.Mine",
        "runner.max_ticks=6",
        "evaluate.splits.val=end",
        says=(
            "became nan at tick",
            "One of the last batches of 'classifier' holds numbers that are not finite: {input",
        ),
        code=1,
        has_run=True,
    ),
    "a split of columns": _data(
        "def split(self, name):\n        x, y = samples()\n        return {'input': x, 'target': y}",
        "which are columns; expected a data set of samples. Return torch.utils.data.TensorDataset(inputs, targets)",
    ),
    "a split that is a pair of tensors": _data(
        "def split(self, name):\n        return samples()", "which are columns;"
    ),
    "splits that fail": _data(
        "@property\n    def splits(self):\n        raise RuntimeError('not yet')",
        "data: slip.Mine (slip/__init__.py, line 7) failed at slip/__init__.py, line 10, in splits: RuntimeError: not yet",
    ),
    "no split at all": _data("splits = ()", "has splits = (); expected splits (a tuple of names)"),
    "splits that are numbers": _data("splits = [0, 1]", "has splits = [0, 1]; expected splits (a tuple of names)"),
    "whole batches that are None": _batches(
        "return None", "the __getitems__ of slip.Mine.split", "returned None for 8"
    ),
    "too few samples of a batch": _batches(
        "return [self[each] for each in indices[1:]]", "returned 7 samples for 8 indices; expected one for each"
    ),
    "a batch that is too small": _batches(
        "return {'input': self.inputs[:3], 'target': self.targets[:3]}", "returned 3 samples for 8 indices"
    ),
    # metrics and analyses
    "a metric that takes a key out of the batch": _metric(
        'batch.pop("target")\n    return {"a": 1.0}',
        "returned its numbers, and a batch or a module that it has changed",
    ),
    "a metric that changes the module": _metric(
        'for each in module.parameters():\n        each.data.zero_()\n    return {"a": 1.0}',
        "returned its numbers, and a batch or a module that it has changed",
    ),
    "a metric without values": _metric(
        'return {"a": torch.ones((), device="meta")}', "returned a tensor that is on the device 'meta' as 'a'"
    ),
    "a metric of numpy": _metric(
        'import numpy\n    return {"a": numpy.ones(16)}', "a ndarray of shape (16,) as 'a'", "torch.as_tensor(x)"
    ),
    "an analysis that returns complex numbers": _analysis(
        'return {"a": torch.tensor(1j)}', "returned a tensor of shape () of torch.complex64 as 'a'"
    ),
    "an analysis with a long name": _analysis('return {200 * "a": 1}', "expected at most 100 letters, digits"),
    # optimizers and schedulers
    "an optimizer that keeps objects": _state(
        f"{STEP}self.state[self.param_groups[0]['params'][0]]['o'] = object()",
        "problems.classifier.optimizer: its state_dict() holds an object, of class builtins.object, at 'state.0.o'",
        at_build=False,
    ),
    "an optimizer that keeps a function": _state(
        f"{SGD}def __init__(self, params, lr):\n        super().__init__(params, lr)\n        self.param_groups[0]['f'] = lambda: 1",
        "problems.classifier.optimizer: its state_dict() holds the function <lambda>",
        "or leave it out",
    ),
    "rates of numpy": _state(
        f"import numpy\n\n\n{SCHEDULER}def get_lr(self):\n        return [numpy.float64(0.1)]",
        "its state_dict() holds a float64 of shape (), of class numpy.float64, at 'param_groups.0.lr'",
        "or a number as in float(x)",
        key="scheduler",
    ),
    "an optimizer with a text for a rate": _optimizer(
        f"{SGD}def __init__(self, params, lr):\n        super().__init__(params, lr)\n        self.param_groups[0]['lr'] = 'fast'",
        "problems.classifier.optimizer.lr: found 'fast'; expected a number",
    ),
    "an optimizer for sparse gradients": _optimizer(
        "def Mine(params, lr):\n    return torch.optim.SparseAdam(params, lr=lr)",
        "SparseAdam does not support dense gradients",
        code=1,
        has_run=True,
    ),
    "a scheduler of another optimizer": _code(
        "def Mine(optimizer):\n    other = torch.optim.SGD(Net().parameters(), lr=1.0)\n"
        "    return torch.optim.lr_scheduler.StepLR(other, 1)",
        f"{P}scheduler={{_target_: slip.Mine}}",
        says=("StepLR sets the rates of another optimizer; expected the one that it was given",),
    ),
    "a scheduler that returns texts": _code(
        f"{SCHEDULER}def get_lr(self):\n        return ['fast']",
        f"{P}scheduler={{_target_: slip.Mine}}",
        says=(
            "optimizer.lr: found 'fast'; expected a number. Let slip.Mine (slip/__init__.py, line 7) return numbers",
        ),
    ),
    "a scheduler that returns one number": _code(
        f"{SCHEDULER}def get_lr(self):\n        return 0.1",
        f"{P}scheduler={{_target_: slip.Mine}}",
        says=("slip.Mine (slip/__init__.py, line 7) failed: TypeError: 'float' object is not iterable",),
    ),
}
