"""In the user's own code: `slip` is their package beside `mypackage`, whose recipe names one thing of it."""
# ruff: noqa: E501 - what is said stands in one line

from tests.cli.mistakes.mistake import Mistake

HEAD = """\
import torch
from torch import nn
import torch.nn.functional as F
from mypackage.data import Data, Dicts, samples
from mypackage.models import Net

"""
P = "problems.classifier."
CROSS_ENTROPY = 'F.cross_entropy(model(batch["input"]), batch["target"])'
MINE = "class Mine(Net):\n    "
CALLED = "slip/__init__.py, line"


def _code(source: str, *words: str, says: tuple[str, ...], code: int = 2, has_run: bool = False) -> Mistake:
    trust = ("--trust", "mypackage", "--trust", "slip")
    files = {"slip/__init__.py": f"{HEAD}{source}\n"}
    return Mistake(("run", "mine.yaml", *trust, *words), says, code, files, leaves=("run",) if has_run else ())


def _loss(body: str, *says: str, before: str = "", code: int = 2, has_run: bool = False) -> Mistake:
    source = f"{before}def loss(batch, *, model):\n    {body}"
    return _code(source, f"{P}loss._target_=slip.loss", says=says, code=code, has_run=has_run)


def _module(body: str, *says: str, before: str = "") -> Mistake:
    return _code(f"{before}{MINE}{body}", f"{P}module._target_=slip.Mine", says=says)


def _item(result: str, *says: str, words: tuple[str, ...] = (), code: int = 2) -> Mistake:
    source = (
        f"class Items(Dicts):\n    def __getitem__(self, index):\n        {result}\n\n\n"
        "class Mine(Data):\n    def split(self, name):\n        return Items(*samples())"
    )
    return _code(source, "data._target_=slip.Mine", *words, says=says, code=code)


def _data(body: str, *says: str) -> Mistake:
    return _code(f"class Mine(Data):\n    {body}", "data._target_=slip.Mine", says=says)


def _metric(
    result: str, *says: str, words: tuple[str, ...] = (), before: str = "", code: int = 2, has_run: bool = False
) -> Mistake:
    source = f"{before}def metric(module, batch):\n    {result}"
    words = ("evaluate.metrics=[accuracy,{_target_: slip.metric}]", *words)
    return _code(source, *words, says=says, code=code, has_run=has_run)


def _analysis(result: str, *says: str) -> Mistake:
    node = "+analyses.a={_target_: slip.analyse, roles: {model: classifier}, split: val, batch_size: 8}"
    return _code(f"def analyse(batches, *, model):\n    {result}", node, says=says, code=2)


def _optimizer(source: str, *says: str, code: int = 2, has_run: bool = False) -> Mistake:
    return _code(source, f"{P}optimizer._target_=slip.Mine", says=says, code=code, has_run=has_run)


FUNCTION = """\
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient


"""
MISTAKES = {
    "a relative import that leads out of the package": _loss(
        f"return {CROSS_ENTROPY}",
        "importing 'slip' failed",
        "beyond top-level package",
        before="from ..losses import x\n",
    ),
    "exit at import": _loss(
        f"return {CROSS_ENTROPY}", "importing 'slip' failed", "SystemExit", before="import sys\nsys.exit(0)\n"
    ),
    "a loss that yields": _loss(f"yield {CROSS_ENTROPY}", f"slip.loss ({CALLED} 7) returned a generator", "0-D tensor"),
    "a loss that is a module": _code(
        f"class loss(nn.Module):\n    def forward(self, batch, *, model):\n        return {CROSS_ENTROPY}",
        f"{P}loss._target_=slip.loss",
        says=(f"{P}loss: slip.loss", "unexpected keyword argument 'model'"),
    ),
    "torch's loss in place of a function": _code(
        "", f"{P}loss._target_=torch.nn.CrossEntropyLoss", says=("which is no loss", "'mlotool.losses.cross_entropy'")
    ),
    "a complex loss": _loss(f"return 1j * {CROSS_ENTROPY}", "returned a complex number; expected a real one"),
    "no_grad around a loss": _loss(
        f"return {CROSS_ENTROPY}", f"slip.loss ({CALLED} 7) returned a tensor without", before="@torch.no_grad()\n"
    ),
    "backward in a loss": _loss(
        f"loss = {CROSS_ENTROPY}\n    loss.backward()\n    return loss",
        f"{P}loss: slip.loss",
    ),
    "a batch that is scaled in place": _loss(
        f'batch["input"].mul_(2)\n    return {CROSS_ENTROPY}', "a batch that it has changed", "Write x = x * 2"
    ),
    "a key taken out of the batch": _loss(
        f'batch.pop("index")\n    return {CROSS_ENTROPY}', "a batch that it has changed", "copy a dict"
    ),
    "a copy of a role": _loss(
        'import copy\n    return F.cross_entropy(copy.deepcopy(model)(batch["input"]), batch["target"])',
        "whose gradient does not reach the parameters",
        "no copies of them",
    ),
    "an attribute of a role": _loss(
        f"model.temperature = 2.0\n    return {CROSS_ENTROPY}",
        f"slip.loss ({CALLED} 7) failed at {CALLED} 8",
        "object has no attribute 'temperature'",
    ),
    "a role that is frozen": _loss(
        f"for each in model.parameters():\n        each.requires_grad_(False)\n    return {CROSS_ENTROPY}",
        f"slip.loss ({CALLED} 7) failed at {CALLED} 9",
        "requires_grad of the parameter 'layer.weight' of 'classifier' is set to False",
        "Take stop_gradient(role(x))",
    ),
    "a role whose parameters are frozen by assignment": _loss(
        f"for each in model.parameters():\n        each.requires_grad = False\n    return {CROSS_ENTROPY}",
        f"slip.loss ({CALLED} 7) failed at {CALLED} 9",
        "requires_grad of the parameter 'layer.weight' of 'classifier' is set to False",
    ),
    "a role in train mode": _loss(
        f"model.train()\n    return {CROSS_ENTROPY}", "a role has no 'train'; it can be called"
    ),
    "exit in a loss": _loss(
        "import sys\n    sys.exit(0)", f"{CALLED} 9, in loss: SystemExit: 0", "nothing has finished"
    ),
    "an assertion": _loss('assert batch["input"].shape[1] == 3', f"{CALLED} 8, in loss: AssertionError"),
    "a metric with the name of the loss": _loss(
        f'return LossOutput({CROSS_ENTROPY}, {{"loss": torch.ones(())}})',
        "a metric with the name 'loss'",
        "Rename it",
        before="from mlotool import LossOutput\n",
    ),
    "metrics as a list": _loss(
        f"return LossOutput({CROSS_ENTROPY}, [1.0])", "a list as metrics", before="from mlotool import LossOutput\n"
    ),
    "warnings as errors": _loss(
        f"warnings.warn('old')\n    return {CROSS_ENTROPY}",
        "a warning came as an error",
        "remove warnings.simplefilter('error')",
        before="import warnings\nwarnings.simplefilter('error')\n",
        code=1,
        has_run=True,
    ),
    "a module in double precision": _module(
        "def __init__(self):\n        super().__init__()\n        self.double()",
        "problems.classifier.loss",
    ),
    "a module that calls itself": _module("def forward(self, x):\n        return self(x)", "RecursionError"),
    "a module that returns a pair": _module(
        "def forward(self, x):\n        return super().forward(x), x", "must be Tensor, not tuple", "slip.Mine"
    ),
    "a module that changes its activations": _module(
        "def forward(self, x):\n        y = super().forward(x).exp()\n        return y.add_(1)",
        "modified by an inplace operation",
    ),
    "a module that makes parameters in its forward": _module(
        "def forward(self, x):\n        self.extra = nn.Parameter(torch.ones(10))\n        return super().forward(x) * self.extra",
        f"slip.Mine ({CALLED} 7) has made the parameter 'extra' in its forward; expected all of them in __init__",
    ),
    "a module without values": _module(
        "def __init__(self):\n        super().__init__()\n        self.to('meta')", "on the device 'meta'"
    ),
    "a layer in a list": _code(
        "class Mine(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.layers = [nn.Linear(64, 10)]",
        f"{P}module._target_=slip.Mine",
        says=("Mine has no parameter that requires a gradient",),
    ),
    "a backward with too many gradients": _module(
        "def forward(self, x):\n        return Twice.apply(super().forward(x))",
        "returned an incorrect number of gradients",
        before=FUNCTION,
    ),
    "a lazy layer that nothing calls": _code(
        f"{MINE}def __init__(self):\n        super().__init__()\n        self.spare = nn.LazyLinear(3)",
        f"{P}module._target_=slip.Mine",
        says=(f"{P}module: the parameter 'spare.weight' of slip.Mine ({CALLED} 7) has no shape yet", "or remove it"),
        code=1,
        has_run=True,
    ),
    "a parameter that begins as nan": _module(
        "def __init__(self):\n        super().__init__()\n        self.spare = nn.Parameter(torch.full((3,), torch.nan))",
        f"{P}module: found nan in the parameter 'spare' of slip.Mine ({CALLED} 7) before the first step",
        "Correct how it begins",
    ),
    "a sample that is None": _item(
        "return None if index == 3 else super().__getitem__(index)",
        f"making a batch of 16 samples of slip.Items ({CALLED} 7) failed",
        "Expected a sample at every index",
    ),
    "targets below zero": _item('return {"input": self.inputs[index], "target": -1}', "Target -1 is out of bounds"),
    "targets one-hot": _item(
        'return {"input": self.inputs[index], "target": F.one_hot(self.targets[index], 10)}', "as .argmax(1)"
    ),
    "targets one-hot as floats": _item(
        'return {"input": self.inputs[index], "target": F.one_hot(self.targets[index], 10).float()}',
        "evaluate.metrics: the metric accuracy failed: TypeError: targets are no numbers of classes",
    ),
    "pictures of PIL": _item(
        'from PIL import Image; return {"input": Image.new("L", (8, 8)), "target": 0}', "PIL", "ToTensor makes one"
    ),
    "texts as inputs": _item('return {"input": "a sentence", "target": 0}', "input: a list of 8: ['a sentence'"),
    "cancelled at import": _loss(
        f"return {CROSS_ENTROPY}",
        "importing 'slip' failed at slip/__init__.py, line 8: CancelledError; expected that it imports",
        before="import asyncio\nraise asyncio.CancelledError\n",
    ),
    "a cancelled loss": _loss(
        "import asyncio\n    raise asyncio.CancelledError", f"{CALLED} 9, in loss: CancelledError. Expected"
    ),
    "a loss that raises GeneratorExit": _loss("raise GeneratorExit", f"{CALLED} 8, in loss: GeneratorExit. Expected"),
    "a loss that is cancelled later": _loss(
        f"global calls\n    calls += 1\n    if calls > 1:\n        raise Stop('enough')\n    return {CROSS_ENTROPY}",
        f"After tick 1: {CALLED} 18, in loss: Stop: enough. Expected",
        before="calls = 0\n\n\nclass Stop(BaseException):\n    pass\n\n\n",
        code=1,
        has_run=True,
    ),
    "a module that cannot be built for GeneratorExit": _module(
        "def __init__(self):\n        raise GeneratorExit",
        f"{P}module: slip.Mine ({CALLED} 7) failed at",
        "GeneratorExit",
    ),
    "a module that exits": _module(
        "def __init__(self):\n        import sys; sys.exit(0)", f"{P}module: slip.Mine", "nothing has finished"
    ),
    "a split that is cancelled": _data(
        "def split(self, name):\n        raise GeneratorExit",
        "data: slip.Mine",
        "in split: GeneratorExit. It was given",
    ),
    "a length that is cancelled": _data(
        "def split(self, name):\n        class More(Dicts):\n            def __len__(self):\n"
        "                raise GeneratorExit\n        return More(*samples())",
        "in __len__: GeneratorExit. Correct __len__",
    ),
    "a cancelled sample": _item("raise GeneratorExit", f"{CALLED} 9, in __getitem__: GeneratorExit. Expected"),
    "a cancelled sample of a loading process": _item(
        "import asyncio; raise asyncio.CancelledError",
        f"{CALLED} 9, in __getitem__: CancelledError. Expected",
        words=(f"{P}stream.num_workers=1",),
    ),
    "a sample of a loading process that exits": _item(
        "import sys; sys.exit(3)",
        f"{CALLED} 9, in __getitem__: SystemExit: 3",
        "nothing has finished",
        words=(f"{P}stream.num_workers=1",),
    ),
    "a cancelled metric": _metric("raise GeneratorExit", "evaluate.metrics", "in metric: GeneratorExit. It was given"),
    "a cancelled analysis": _analysis("raise GeneratorExit", "analyses.a", "in analyse: GeneratorExit. Expected"),
    "a cancelled step": _optimizer(
        "class Mine(torch.optim.SGD):\n    def step(self, closure=None):\n        raise GeneratorExit",
        f"After tick 0: {CALLED} 9, in step: GeneratorExit. Expected",
        code=1,
        has_run=True,
    ),
    "a cancelled scheduler": _code(
        "class Mine(torch.optim.lr_scheduler.LRScheduler):\n    def get_lr(self):\n        raise GeneratorExit",
        f"{P}scheduler={{_target_: slip.Mine}}",
        says=(f"{P}scheduler: slip.Mine", "in get_lr: GeneratorExit"),
    ),
    "a sample that exits": _item("import sys; sys.exit('no file')", "in __getitem__: SystemExit: no file"),
    "a loading process that ends": _item(
        "import os; os._exit(3)", "A process that loads Items", words=(f"{P}stream.num_workers=1",), code=1
    ),
    "a loading process that ends in a dry run": _item(
        "import os; os._exit(3)",
        "A process that loads Items",
        words=(f"{P}stream.num_workers=1", "debug=fast"),
        code=1,
    ),
    "splits as a text": _data("splits = 'train'", "has splits = 'train'; expected splits (a tuple of names)"),
    "a split without a name": _data(
        "def split(self):\n        return Dicts(*samples())", "takes 1 positional argument"
    ),
    "a loader for a data set": _data(
        "def split(self, name):\n        return torch.utils.data.DataLoader(Dicts(*samples()))",
        "class DataLoader, without",
    ),
    "a length that is too large": _data(
        "def split(self, name):\n        class More(Dicts):\n            def __len__(self):\n                return 99\n"
        "        return More(*samples())",
        "IndexError",
        "index = ",
    ),
    "a metric with a slash": _metric('return {"top/1": torch.ones(())}', "the name 'top/1'; expected letters, digits"),
    "a metric whose names change from batch to batch": _metric(
        'return {f"batch_{batch[' + "'index'" + '][0]}": torch.ones(())}',
        "evaluate.metrics[1]: slip.metric",
        "returned other names than for its first batch: 'batch_16' is new, 'batch_0' is missing",
        "expected the same names for every batch",
        code=1,
        has_run=True,
    ),
    "a metric with a name more in the second evaluation": _metric(
        'calls.append(1); return {"a": torch.ones(())} | ({"b": torch.ones(())} if len(calls) > 4 else {})',
        "returned other names than for its first batch: 'b' is new; expected",
        words=("runner.max_ticks=4",),
        before="calls = []\n\n\n",
        code=1,
        has_run=True,
    ),
    "a complex metric": _metric('return {"a": torch.tensor(1j)}', "complex numbers as 'a'; expected real ones"),
    "an objective that is not a number": _metric(
        'return {"a": torch.tensor(float("nan"))}',
        "warning: objective: 'val/a' is nan at tick 2",
        words=("objective=val/a",),
        code=0,
        has_run=True,
    ),
    "a thousand metrics": _metric(
        'return {f"m{n}": torch.ones(()) for n in range(1000)}', "961 more in metrics.csv", code=0, has_run=True
    ),
    "an analysis that returns a list": _analysis("return [1, 2]", f"slip.analyse ({CALLED} 7) returned a list"),
    "an analysis that returns objects": _analysis('return {"a": object()}', "returned an object as 'a'"),
    "an analysis that names a path": _analysis(
        'return {"../x": "text"}', "the name '../x'; expected at most 100 letters, digits"
    ),
    "an optimizer that is none of torch's": _optimizer(
        "class Mine:\n    def __init__(self, params, lr):\n        self.params = list(params)",
        f"{P}optimizer: slip.Mine has returned a Mine; expected a torch Optimizer",
    ),
    "an optimizer without a step": _optimizer(
        "class Mine(torch.optim.Optimizer):\n    def __init__(self, params, lr):\n        super().__init__(params, {'lr': lr})",
        "After tick 0: problems.classifier: its step failed: NotImplementedError.",
        code=1,
        has_run=True,
    ),
    "a scheduler that is none of torch's": _code(
        "class Mine:\n    def __init__(self, optimizer):\n        pass\n    def step(self):\n        pass",
        f"{P}scheduler={{_target_: slip.Mine}}",
        says=(f"{P}scheduler: slip.Mine has returned a Mine; expected a torch LRScheduler",),
    ),
}
