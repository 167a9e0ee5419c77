"""Recipes that a stranger could hand on: what each tries, and what the refusal has to name; a few rows a rule.

CANARY is a path outside the working folder, SECRET an environment variable; what a target makes is `here`, inside it.
"""

HEADER = "# @package _global_\n# Harmless.\n"
BASE = "defaults: [plain, _self_]\n"
LAUGHS = "a: &a [x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


def _classifier(part: str) -> str:
    return f"problems: {{classifier: {{{part}}}}}"


# What each is: (lines behind the header, words that the message must hold).
HYDRA = {
    "callback": ("hydra: {callbacks: {x: {_target_: os.mkdir, path: CANARY}}}", ["hydra.callbacks"]),
    "run-folder": ("hydra: {run: {dir: CANARY}}", ["hydra.run"]),
    "searchpath": ("hydra: {searchpath: ['file://CANARY']}", ["hydra.searchpath"]),
    "sweep-of-hydra": ("hydra: {sweeper: {params: {hydra.run.dir: CANARY}}}", ["hydra.run.dir"]),
    "sweep-of-upload": ("hydra: {sweeper: {params: {logger.mode: 'online,offline'}}}", ["logger.mode"]),
}
DEFAULTS = {
    "hydra-group": ("defaults: [plain, {/hydra/callbacks: x}]", ["hydra/callbacks"]),
    "recipe-as-logger": ("defaults: [plain, parts/upload@logger]", ["package 'logger'"]),
    "parent": ("defaults: [../../outside]", ["../../outside"]),
    "file-scheme": ("defaults: ['file:///etc/x']", ["file:"]),
    "environment": ("defaults: ['${oc.env:SECRET}']", ["oc.env"]),
    "circle": ("defaults: [plain, hostile]", ["twice", "hostile"]),
    "choices": (
        "defaults:\n- plain\n" + "".join(f"- /model@problems.q{i}.module: mlp\n" for i in range(200)),
        ["recipes and options"],
    ),
}
YAML = {
    "python-apply": ("seed: !!python/object/apply:os.mkdir [CANARY]", ["python/object/apply:os.mkdir"]),
    "billion-laughs": (LAUGHS, ["aliases", "1000"]),
    "self-alias": ("a: &a [*a]", ["40 levels"]),
    "deep": ("a: " + "[" * 500 + "]" * 500, ["40 levels"]),
    "large": ("# x\n" * 40_000, ["100000 bytes"]),
    "long-number": (f"seed: {'9' * 5_000}", ["999", "2000"]),
    "escape-sequence": ('name: "\\e]0;owned\\a"', ["\\x1b]0;owned"]),
}
REFERENCES = {
    "environment": ("data: {root: '${oc.env:SECRET}'}", ["data.root", "oc.env"]),
    "hydra-node": ("objective: '${hydra.runtime.cwd}'", ["hydra.runtime.cwd"]),
    "inside-select": ("objective: '${oc.select:seed,${oc.env:SECRET}}'", ["oc.env"]),
    "node-laughs": (
        "analyses:\n  a0: [x, x, x, x]\n"
        + "".join(f"  a{i}: ['${{analyses.a{i - 1}}}', '${{analyses.a{i - 1}}}']\n" for i in range(1, 40)),
        ["references", "analyses.a"],
    ),
    "circle": ("analyses: {a: '${analyses.b}', b: '${analyses.a}'}", ["analyses.a"]),
    "whole-logger": ("logger: '${analyses.x}'\nanalyses: {x: {mode: online}}", ["logger", "${analyses.x}"]),
}
PLACES = {
    "name-outside": ("name: ../../outside", ["../../outside"]),
    "upload": ("logger: {mode: online}", ["logger.mode", "online"]),
    "root-absolute": ("data: {root: /etc}", ["data.root", "/etc"]),
    "loader": ("data: {loader: torch.load}", ["data.loader", "torch.load"]),
    "weights-only": (_classifier("module: {weights_only: false}"), ["weights_only", "False"]),
    "download": ("data: {download: true}", ["data.download", "True"]),
}
TARGETS = {
    **{
        name: (_classifier(f"loss: {{_target_: '{name}', path: here}}"), ["classifier.loss._target_", name])
        for name in ("os.mkdir", "builtins.eval", "torch.load", "torch.nn.Linear.__init__", "torch.nn.linear",
                     "mlotool.config.provenance.subprocess.run", "mlotool.losses.cross_entropy.__globals__")
    },
    "nested": (
        _classifier("module: {inner: [{x: {_target_: os.mkdir, path: here}}]}"), ["module.inner[0].x._target_"],
    ),
    "layer": (
        _classifier("module: {_target_: torch.nn.Sequential, _args_: [{_target_: os.mkdir}]}"), ["_args_[0]._target_"],
    ),
    "partial": (_classifier("module: {_partial_: true}"), ["module._partial_", "True"]),
    "referred": ("data: {_target_: '${analyses.x}'}\nanalyses: {x: os.mkdir}", ["data._target_", "os.mkdir"]),
}  # fmt: skip
OPERATOR = "_target_: mlotool.spaces.Operator, name: kernel, at: {type: ReLU}, candidates: {k: null}"


def _space(mutator: str = OPERATOR, decisions: str = "{}") -> str:
    base = "{_target_: mlotool.models.MLP, image_shape: [1, 8, 8], hidden: [8, 8], num_classes: 10}"
    space = f"{{_target_: mlotool.spaces.Space, base: {base}, inputs: [1, 8, 8], mutators: [{{{mutator}}}]}}"
    return f"{_classifier(f'module: {space}')}\ndecisions: {decisions}"


SPACES = {
    "predicate": (
        _space(OPERATOR.replace("{type: ReLU}", "{where: {_target_: os.mkdir, path: here}}")),
        ["mutators[0].at.where._target_", "os.mkdir"],
    ),
    "candidate": (
        _space(OPERATOR.replace("{k: null}", "{k: {_target_: os.mkdir, path: here}}")), ["candidates.k._target_"],
    ),
    "large-candidate": (
        _space(OPERATOR.replace("k: null", "k: {_target_: torch.nn.Linear, out_features: 1000000000000}")),
        ["mutators[0].candidates.k: torch.nn", "cannot be built"],
    ),
    "counts": (
        _space("_target_: mlotool.spaces.Repeat, name: m, at: {type: ReLU}, counts: [1, 1000000000]"), ["1000"],
    ),
    "decision-path": (_space(decisions="{kernel_0: ../../etc/passwd}"), ["decisions.kernel_0", "../../etc/passwd"]),
}  # fmt: skip


def _many(lines: str, num: int, end: str = "\n") -> str:
    return end.join(lines.replace("#", str(index)) for index in range(num))


# Small files that cost Hydra, OmegaConf or our own checks much more than their size, as they once did.
LARGE = {
    "problems-by-alias": ("analyses: {x: &a {}}\nproblems:\n" + _many("  p#: *a", 130), ["nothing is set"]),
    "edges": (
        "graph: {lower_to_upper: {x: &a [" + _many("q#", 80, ", ") + "], " + _many("b#: *a", 9, ", ") + "}}",
        ["... and"],
    ),
    "metrics": ("evaluate: {metrics: [" + _many("accurac#", 850, ", ") + "]}", ["and 830 more"]),
}
RECIPES: dict[str, tuple[str, list[str]]] = {
    f"{kind}:{name}": (lines if "defaults:" in lines else BASE + lines, words)
    for kind, group in (
        ("hydra", HYDRA), ("defaults", DEFAULTS), ("yaml", YAML), ("references", REFERENCES), ("places", PLACES),
        ("targets", TARGETS), ("spaces", SPACES), ("large", LARGE),
    )
    for name, (lines, words) in group.items()
}  # fmt: skip
