"""Recipes that a stranger could hand on: what each tries, and what the refusal has to name.

CANARY is a path outside the working folder, SECRET an environment variable; what a target makes is `here`, inside it.
"""

HEADER = "# @package _global_\n# Harmless.\n"
BASE = "defaults: [plain, _self_]\n"


def _target(place: str, node: str) -> str:
    """Put a node in a dotted place: `a.b` becomes `{a: {b: node}}`."""
    for key in reversed(place.split(".")):
        node = f"{{{key}: {node}}}"
    return node.removeprefix("{").removesuffix("}")


# What each is: (lines behind the header, words that the message must hold).
HYDRA = {
    "callback": ("hydra: {callbacks: {x: {_target_: os.mkdir, path: CANARY}}}", ["hydra.callbacks"]),
    "logging-class": ("hydra: {job_logging: {formatters: {x: {(): os.mkdir, path: CANARY}}}}", ["hydra.job_logging"]),
    "log-file": (
        "hydra: {hydra_logging: {handlers: {x: {class: logging.FileHandler, filename: CANARY}}}}",
        ["hydra.hydra_logging"],
    ),
    "run-folder": ("hydra: {run: {dir: CANARY}}", ["hydra.run"]),
    "sweep-folder": ("hydra: {sweep: {dir: CANARY}}", ["hydra.sweep"]),
    "output-subdir": ("hydra: {output_subdir: CANARY}", ["hydra.output_subdir"]),
    "searchpath": ("hydra: {searchpath: ['file://CANARY']}", ["hydra.searchpath"]),
    "env-set": ("hydra: {job: {env_set: {PYTHONSTARTUP: CANARY}}}", ["hydra.job"]),
    "chdir": ("hydra: {job: {chdir: true}}", ["hydra.job"]),
    "launcher": ("hydra: {launcher: {_target_: os.mkdir, path: CANARY}}", ["hydra.launcher"]),
    "sweeper": ("hydra: {sweeper: {_target_: os.mkdir, path: CANARY}}", ["hydra.sweeper._target_"]),
    "help-text": ("hydra: {help: {template: '${oc.env:SECRET}'}}", ["hydra.help"]),
    "dotted-key": ("? hydra.run.dir\n: CANARY", ["hydra.run.dir"]),
    "merged-key": ("x: &a {hydra: {run: {dir: CANARY}}}\n<<: *a", ["hydra.run"]),
    "sweep-of-hydra": ("hydra: {sweeper: {params: {hydra.run.dir: CANARY}}}", ["hydra.run.dir"]),
    "sweep-of-name": ("hydra: {sweeper: {params: {name: '../../x,y'}}}", ["name"]),
    "sweep-of-upload": ("hydra: {sweeper: {params: {logger.mode: 'online,offline'}}}", ["logger.mode"]),
    "sweep-of-paths": ("hydra: {sweeper: {params: {data.root: '\"/etc\",x'}}}", ["data.root", "/etc"]),
    "sweep-of-recipe": ("hydra: {sweeper: {params: {+recipe@logger: 'a,b'}}}", ["recipe@logger"]),
}
DEFAULTS = {
    "override-logging": ("defaults: [plain, {override hydra/job_logging: default}]", ["hydra/job_logging"]),
    "hydra-group": ("defaults: [plain, {/hydra/callbacks: x}]", ["hydra/callbacks"]),
    "hydra-launcher": ("defaults: [plain, {override /hydra/launcher: joblib}]", ["hydra/launcher"]),
    "package-hydra": ("defaults: [plain, {/model@hydra.callbacks.x: mlp}]", ["hydra.callbacks.x"]),
    "recipe-as-hydra": ("defaults: [plain@hydra]", ["package 'hydra'"]),
    "recipe-as-logger": ("defaults: [plain, parts/upload@logger]", ["package 'logger'"]),
    "absolute": ("defaults: [plain, //etc/passwd]", ["//etc/passwd"]),
    "absolute-option": ("defaults: [plain, {/data: /etc/passwd}]", ["/etc/passwd"]),
    "parent": ("defaults: [../../outside]", ["../../outside"]),
    "parent-option": ("defaults: [plain, {override /data: ../../x}]", ["../../x"]),
    "file-scheme": ("defaults: ['file:///etc/x']", ["file:"]),
    "pkg-scheme": ("defaults: ['pkg://os.path']", ["pkg:"]),
    "environment": ("defaults: ['${oc.env:SECRET}']", ["oc.env"]),
    "environment-option": ("defaults: [plain, {override /data: '${oc.env:SECRET}'}]", ["oc.env"]),
    "null-byte": ('defaults: ["plain\\0"]', ["do not print"]),
    "circle": ("defaults: [plain, hostile]", ["twice", "hostile"]),
    "unknown": ("defaults: [plain, nothing_of_this_name]", ["nothing_of_this_name"]),
}
YAML = {
    "python-apply": ("seed: !!python/object/apply:os.mkdir [CANARY]", ["python/object/apply:os.mkdir"]),
    "python-new": ("seed: !!python/object/new:os.mkdir [CANARY]", ["python/object/new:os.mkdir"]),
    "python-name": ("seed: !!python/name:os.system ''", ["python/name:os.system"]),
    "python-path": ("data: {root: !!python/object/apply:pathlib.PosixPath [/etc]}", ["pathlib.PosixPath"]),
    "tag-directive": ("seed: !<tag:yaml.org,2002:python/object/apply:os.mkdir> [CANARY]", ["os.mkdir"]),
    "own-tag": ("seed: !env SECRET", ["!env"]),
    "binary": ("name: !!binary aGk=", ["binary"]),
    "billion-laughs": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        ["aliases", "1000"],
    ),
    "merge-laughs": (
        "a: &a {k: x}\n"
        + "".join(
            f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        ["aliases", "1000"],
    ),
    "self-alias": ("a: &a [*a]", ["alias 'a'"]),
    "duplicate-key": ("seed: 1\nseed: 2", ["'seed' twice"]),
    "deep": ("a: " + "[" * 5_000 + "]" * 5_000, ["40 levels"]),
    "deep-block": ("".join(" " * i + "a:\n" for i in range(60)), ["40 levels"]),
    "many-keys": ("".join(f"k{i}: 0\n" for i in range(11_000)), ["1000 values"]),
    "large": ("# x\n" * 40_000, ["100000 bytes"]),
    "many-values": ("data: [" + "1," * 25_000 + "]", ["1000 values"]),
    "long-key": (f"{'k' * 1_000}: 1", ["kkk", "200"]),
    "long-text": (f"name: {'n' * 3_000}", ["nnn", "2000"]),
    "long-number": (f"seed: {'9' * 5_000}", ["999", "2000"]),
    "not-a-number": ("seed: 0b_", ["0b_"]),
    "complex-key": ("? [a, b]\n: 1", ["unhashable"]),
    "null-key": ("~: 1", ["None"]),
    "two-documents": ("seed: 1\n--- \nhydra: {run: {dir: CANARY}}", ["document"]),
    "escape-sequence": ('name: "\\e]0;owned\\a"', ["\\x1b]0;owned"]),
    "turned-text": ("name: a\u202eb", ["\\u202e"]),
    "strange-key": ("problems: {'c\u0430t': {unroll_steps: 1}}", ["ASCII"]),
}
REFERENCES = {
    "environment": ("data: {root: '${oc.env:SECRET}'}", ["data.root", "oc.env"]),
    "environment-default": ("objective: '${oc.env:NOTHING,x}'", ["objective", "oc.env"]),
    "create": ("data: '${oc.create:{a: b}}'", ["oc.create"]),
    "decode": ("seed: '${oc.decode:\"${name}\"}'", ["seed", "oc.decode"]),
    "deprecated": ("seed: '${oc.deprecated:oc.env}'", ["oc.deprecated"]),
    "hydra-runtime": ("name: '${hydra:runtime.cwd}'", ["hydra:runtime.cwd"]),
    "hydra-node": ("objective: '${hydra.runtime.cwd}'", ["hydra.runtime.cwd"]),
    "now": ("objective: '${now:%Y}'", ["now:"]),
    "nested-name": ("objective: '${${name}:SECRET}'", ["${name}"]),
    "split-name": ("objective: '${oc.${name}:SECRET}'", ["${name}"]),
    "inside-select": ("objective: '${oc.select:seed,${oc.env:SECRET}}'", ["oc.env"]),
    "quoted-inside": ("objective: '${oc.select:seed,\"${oc.env:SECRET}\"}'", ["oc.env"]),
    "escaped": ("objective: '\\${oc.env:SECRET}'", ["oc.env"]),
    "in-a-key": ("problems: {'${oc.env:SECRET}': {}}", ["oc.env"]),
    "text-laughs": (
        "analyses:\n  a0: xxxxxxxxxx\n"
        + "".join(f"  a{i}: '${{analyses.a{i - 1}}}${{analyses.a{i - 1}}}'\n" for i in range(1, 60)),
        ["analyses.a1"],
    ),
    "node-laughs": (
        "analyses:\n  a0: [x, x, x, x]\n"
        + "".join(f"  a{i}: ['${{analyses.a{i - 1}}}', '${{analyses.a{i - 1}}}']\n" for i in range(1, 40)),
        ["references", "analyses.a"],
    ),
    "endless": ("analyses: {a: {b: '${analyses.a}'}}", ["analyses.a.b"]),
    "circle": ("analyses: {a: '${analyses.b}', b: '${analyses.a}'}", ["analyses.a"]),
    "whole-logger": ("logger: '${analyses.x}'\nanalyses: {x: {mode: online}}", ["logger", "${analyses.x}"]),
}
PLACES = {
    "name-outside": ("name: ../../outside", ["../../outside"]),
    "name-absolute": ("name: CANARY", ["name", "canary"]),
    "upload": ("logger: {mode: online}", ["logger.mode", "online"]),
    "root-absolute": ("data: {root: /etc}", ["data.root", "/etc"]),
    "root-home": ("data: {root: ~/.ssh}", ["data.root", "~/.ssh"]),
    "root-parent": ("data: {root: a/../../b}", ["data.root", "a/../../b"]),
    "root-url": ("data: {root: 'http://127.0.0.1/x'}", ["data.root", "http://"]),
    "parameters-file": (
        "problems: {classifier: {module: {parameters_file: CANARY}}}",
        ["problems.classifier.module.parameters_file"],
    ),
    "tokenizer": ("data: {tokenizer: \\\\host\\share}", ["data.tokenizer"]),
    "dirpath": ("problems: {classifier: {module: {dirpath: here}}}", ["dirpath", "here"]),
    "loader": ("data: {loader: torch.load}", ["data.loader", "torch.load"]),
    "weights": ("problems: {classifier: {module: {weights: DEFAULT}}}", ["weights", "DEFAULT"]),
    "weights-only": ("problems: {classifier: {module: {weights_only: false}}}", ["weights_only", "False"]),
    "download": ("data: {download: true}", ["data.download", "True"]),
    "download-reference": ("data: {download: '${runner.report}'}", ["data.download"]),
    "analysis-file": (
        "analyses: {../../x: {_target_: mlotool.losses.decay_analysis, roles: {model: classifier}}}",
        ["../../x"],
    ),
    "split-formula": ("evaluate: {splits: {'=1+1': 100}}", ["=1+1"]),
    "graph-markup": ("graph: {upper_to_lower: {'a[<img src=x>]': [classifier]}}", ["<img src=x>"]),
}
_CODE = [
    *("os.system", "os.mkdir", "builtins.eval", "builtins.exec", "subprocess.run", "pickle.loads", "torch.load"),
    *("torch.hub.load", "torch.nn.modules.module.torch.load", "torchvision.datasets.folder.os.mkdir"),
    *(
        "mlotool.config.provenance.subprocess.run",
        "mlotool.losses.cross_entropy.__globals__",
        "hydra.utils.instantiate",
    ),
    *("torch.nn.Linear.__init__", "torch.nn.linear", " torch.nn.Linear", "torch.nn.Linear ", "t\u043erch.nn.Linear"),
]
_PLACES = ("problems.classifier.module", "problems.classifier.loss", "problems.classifier.optimizer", "data")
TARGETS = {
    **{
        f"{name}-as-{place.rpartition('.')[2]}": (
            BASE + _target(place, f"{{_target_: '{name}', path: here}}"),
            [f"{place}._target_", ascii(name)[1:-1]],
        )
        for name, place in ((name, _PLACES[index % len(_PLACES)]) for index, name in enumerate(_CODE))
    },
    "nested": (
        BASE + _target("problems.classifier.module", "{inner: [{x: {_target_: os.mkdir, path: here}}]}"),
        ["problems.classifier.module.inner[0].x._target_", "os.mkdir"],
    ),
    "solver": (
        BASE + "hypergradient: {_target_: mlotool.hypergradient.Implicit, solver: {_target_: os.mkdir, path: here}}",
        ["hypergradient.solver._target_", "os.mkdir"],
    ),
    "layer": (
        BASE + "problems: {classifier: {module: {_target_: torch.nn.Sequential, _args_: [{_target_: os.mkdir}]}}}",
        ["_args_[0]._target_", "os.mkdir"],
    ),
    "analysis": (BASE + "analyses: {x: {_target_: os.mkdir, path: here}}", ["analyses.x._target_", "os.mkdir"]),
    "in-roles": (
        BASE + "problems: {classifier: {loss: {roles: {model: {_target_: os.mkdir, path: here}}}}}",
        ["problems.classifier.loss.roles.model", "os.mkdir"],
    ),
    "by-position": (BASE + "problems: {classifier: {optimizer: {_args_: [here]}}}", ["optimizer._args_", "here"]),
    "partial": (BASE + "problems: {classifier: {module: {_partial_: true}}}", ["module._partial_", "True"]),
    "convert": (BASE + "problems: {classifier: {module: {_convert_: all}}}", ["module._convert_", "all"]),
    "recursive": (BASE + "problems: {classifier: {module: {_recursive_: false}}}", ["module._recursive_", "False"]),
    "list": (BASE + "data: {_target_: [os.mkdir]}", ["data._target_", "os.mkdir"]),
    "number": (BASE + "data: {_target_: 3}", ["data._target_", "3"]),
    "null": (BASE + "data: {_target_: null}", ["data._target_", "None"]),
    "referred": (
        BASE + "data: {_target_: '${analyses.x}'}\nanalyses: {x: os.mkdir}",
        ["data._target_", "os.mkdir"],
    ),
    "collate": (BASE + "problems: {classifier: {stream: {collate_fn: os.mkdir}}}", ["collate_fn"]),
    "worker-init": (BASE + "problems: {classifier: {stream: {worker_init_fn: os.mkdir}}}", ["worker_init_fn"]),
    "hook": (BASE + "problems: {classifier: {optimizer: {foreach_hook: os.mkdir}}}", ["foreach_hook"]),
    "callbacks": (BASE + "runner: {callbacks: [{_target_: os.mkdir}]}", ["callbacks"]),
    "pickled-checkpoint": (BASE + "runner: {resume_from: here}", ["resume_from"]),
}
RECIPES: dict[str, tuple[str, list[str]]] = {
    f"{kind}:{name}": (lines if "defaults:" in lines else BASE + lines, words)
    for kind, group in (
        ("hydra", HYDRA), ("defaults", DEFAULTS), ("yaml", YAML), ("references", REFERENCES), ("places", PLACES),
        ("targets", TARGETS),
    )
    for name, (lines, words) in group.items()
}  # fmt: skip


def _each(lines: str, num: int, end: str = "\n") -> str:
    return end.join(lines.replace("#", str(index)).replace("+", str(index + 1)) for index in range(num))


# Small files that cost Hydra, OmegaConf or our own checks much more than their size, as they once did.
LARGE = {
    "many-problems": (BASE + "problems:\n" + _each("  p#: {}", 2_500), "1000 values"),
    "hundred-problems": (BASE + "problems:\n" + _each("  p#: {}", 99), "and 277 more"),
    "problems-by-alias": (BASE + "analyses: {x: &a {}}\nproblems:\n" + _each("  p#: *a", 130), "130 problems"),
    "edges": (
        BASE + "graph: {lower_to_upper: {x: &a [" + _each("q#", 80, ", ") + "], " + _each("b#: *a", 9, ", ") + "}}",
        "... and",
    ),
    "long-circle": (BASE + "graph: {lower_to_upper: {" + _each("p#: [p+]", 300, ", ") + "}}", "... and"),
    "unknown-keys": (
        BASE + "problems: {classifier: {module: {" + _each("hidde#: 1", 450, ", ") + "}}}",
        "and 430 more",
    ),
    "unknown-metrics": (BASE + "evaluate: {metrics: [" + _each("accurac#", 850, ", ") + "]}", "and 830 more"),
    "long-texts": (BASE + f"data: {{num_classes: [{', '.join(['x' * 2_000] * 45)}]}}", "1000 values"),
    "aliases": (
        BASE + "data: {a: &a [" + "x, " * 90 + "x], b: &b [*a, *a, *a], c: [*b, *b, *b, *b, *b]}",
        "1000 values",
    ),
    "options": ("defaults: [plain, _self_, {override /data: [" + "digits, " * 200 + "digits]}]", "entries in defaults"),
    "choices": ("defaults:\n- plain\n" + _each("- /model@problems.q#.module: mlp", 200), "entries in defaults"),
    "deep-and-wide": (
        BASE + "data: {" + _each("a#: " + "{b: " * 30 + "1" + "}" * 30, 15, ", ") + "}",
        "unknown keyword",
    ),
    "references": (
        BASE + "analyses: {a0: {x: 1}, " + _each("a+: {b: '${analyses.a#}', c: '${analyses.a#}'}", 12, ", ") + "}",
        "500 values",
    ),
}
