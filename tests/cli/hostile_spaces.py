"""Spaces that a stranger could hand on: patterns, counts and names that cost much, and targets that are none.

Each is refused before anything is trained: what each tries, and what the refusal has to name.
"""

from tests.cli.hostile import BASE

OPERATOR = "_target_: mlotool.spaces.Operator, name: kernel, at: {type: ReLU}, candidates: {k: null}"
RELU = "{k: {_target_: torch.nn.ReLU}}"


def _space(mutator: str = OPERATOR, settings: str = "", decisions: str = "") -> str:
    base = "{_target_: mlotool.models.MLP, image_shape: [1, 8, 8], hidden: [8, 8], num_classes: 10}"
    shared = "" if "base:" in settings else f"base: {base}, "
    shared += "" if "inputs:" in settings else "inputs: [1, 8, 8], "
    module = f"{{_target_: mlotool.spaces.Space, {shared}{settings}mutators: [{{{mutator}}}]}}"
    return f"problems: {{classifier: {{module: {module}}}}}\n{decisions}"


def _at(at: str) -> str:
    return _space(OPERATOR.replace("{type: ReLU}", at))


def _candidates(candidates: str) -> str:
    return _space(OPERATOR.replace("{k: null}", candidates))


def _named(name: str) -> str:
    return _space(OPERATOR.replace("name: kernel", f"name: {name}"))


def _decided(decisions: str) -> str:
    return _space(decisions=f"decisions: {decisions}")


def _made(kind: str, settings: str) -> str:
    return _space(f"_target_: mlotool.spaces.{kind}, name: m, {settings}")


def _nested(depth: int) -> str:
    return "{chain: [" * depth + "a" + ", b]}" * depth


PLACES = {
    "regex": (_at("'(a+)+$'"), ["no place for path '(a+)+$'"]),
    "stars": (_at(f"'{'*a' * 900}b'"), ["no place for path '*a*a", "..."]),
    "brackets": (_at(f"'{'[a-' * 600}'"), ["no place for path", "..."]),
    "double-stars": (_at(f"'{'**.' * 600}x'"), ["no place for path '**.**", "..."]),
    "long-path": (_at(f"'{'a.' * 5_000}b'"), ["2000"]),
    "long-chain": (_at("{chain: ['**'" + ", '**'" * 399 + "]}"), ["a chain of path '**', then"]),
    "chain-of-stars": (_at(f"{{chain: ['{'**.' * 600}*', '{'**.' * 600}*', x]}}"), ["no place for a chain"]),
    "chain-in-chain": (_at(_nested(2)), ["at.chain: found a chain", "inside a chain"]),
    "deep-chain": (_at(_nested(30)), ["40 levels"]),
    "type-of-code": (_at("{type: os.system}"), ["no place for type 'os.system'"]),
    "type-is-a-node": (_at("{type: {_target_: os.mkdir, path: here}}"), ["mutators[0].at.type._target_", "os.mkdir"]),
    "predicate": (_at("{where: {_target_: os.mkdir, path: here}}"), ["mutators[0].at.where._target_", "os.mkdir"]),
    "predicate-is-a-layer": (_at("{where: {_target_: torch.nn.ReLU}}"), ["torch.nn.ReLU", "no predicate"]),
    "predicate-is-a-text": (_at("{where: os.system}"), ["at.where: found 'os.system'"]),
    "at-is-a-node": (_at("{_target_: os.mkdir, path: here}"), ["mutators[0].at._target_", "os.mkdir"]),
    "recursive": (_at("&a {path: *a}"), ["alias 'a'"]),
    "sources": (
        _made("Input", f"at: {{type: ReLU}}, sources: '{'**.' * 600}x'"),
        ["no place for path '**.**", "..."],
    ),
    "sources-of-code": (
        _made("Link", "at: {type: ReLU}, sources: {where: {_target_: os.mkdir, path: here}}"),
        ["mutators[0].sources.where._target_", "os.mkdir"],
    ),
    "leaves": (_space(settings=f"leaves: ['{'*a' * 900}'], "), ["leaves: found '*a*a", "no module of MLP"]),
    "many-leaves": (
        _space(settings=f"leaves: [{', '.join(['x'] * 700)}], "),
        ["leaves: found 'x'", "no module of MLP"],
    ),
}
CANDIDATES = {
    "code": (_candidates("{k: {_target_: os.mkdir, path: here}}"), ["candidates.k._target_", "os.mkdir"]),
    "mutator": (_candidates("{k: {_target_: mlotool.spaces.Repeat}}"), ["mlotool.spaces.Repeat", "no module"]),
    "whole": (_candidates("{_target_: os.mkdir, path: here}"), ["mutators[0].candidates._target_", "os.mkdir"]),
    "inside": (
        _candidates("{k: {_target_: torch.nn.Sequential, _args_: [{_target_: os.mkdir, path: here}]}}"),
        ["_args_[0]._target_", "os.mkdir"],
    ),
    "text": (_candidates("{k: os.system}"), ["found 'os.system' as the candidate 'k'"]),
    "thousands": (_candidates("{" + ", ".join(f"c{i}: null" for i in range(5_000)) + "}"), ["1000 values"]),
    "path-as-a-name": (_candidates("{a-b: null, '..': null}"), ["candidates: found the key '..'"]),
    "base": (_space(settings="base: {_target_: os.mkdir, path: here}, "), ["module.base._target_", "os.mkdir"]),
    "mutator-of-code": (_space("_target_: os.mkdir, path: here"), ["mutators[0]._target_", "os.mkdir"]),
    "in-grow": (
        _made("Grow", "at: {type: ReLU}, steps: 1, mutators: {m: {_target_: os.mkdir, path: here}}"),
        ["mutators[0].mutators.m._target_", "os.mkdir"],
    ),
    "large": (
        _candidates("{k: {_target_: torch.nn.Linear, out_features: 1000000000000}}"),
        ["mutators[0].candidates.k: torch.nn", "cannot be built", "Expected room"],
    ),
}
DECISIONS = {
    "path": (_decided("{kernel_0: ../../etc/passwd}"), ["decisions.kernel_0", "../../etc/passwd"]),
    "expression": (_decided("{kernel_0: '=1+1'}"), ["decisions.kernel_0", "=1+1"]),
    "environment": (_decided("{kernel_0: '${oc.env:SECRET}'}"), ["decisions.kernel_0", "oc.env"]),
    "environment-name": (_decided("{'${oc.env:SECRET}': k}"), ["oc.env"]),
    "huge": (_decided(f"{{kernel_0: {'9' * 1_900}}}"), ["decisions.kernel_0: found a whole number of 6312 bits"]),
    "float": (_decided("{kernel_0: .inf}"), ["decisions.kernel_0: found inf"]),
    "node": (_decided("{kernel_0: {_target_: os.mkdir, path: here}}"), ["decisions.kernel_0"]),
    "list": (_decided("{kernel_0: [k, k]}"), ["decisions.kernel_0"]),
    "name": (_decided("{'a b': k}"), ["'a b'"]),
    "capitals": (_decided("{KERNEL: k}"), ["'KERNEL'"]),
    "seed": (_decided("{seed: 3}"), ["found the name 'seed'"]),
    "unknown": (_decided("{kernel_7: k}"), ["decisions.kernel_7", "kernel_0, kernel_1"]),
    "text": (_decided("k"), ["decisions"]),
    "mutator-path": (_named("../../x"), ["../../x"]),
    "mutator-expression": (_named("'${oc.env:SECRET}'"), ["oc.env"]),
    "mutator-long": (_named("n" * 1_900), ["'nnn", "at most 100 characters"]),
    "mutator-number": (_named("3"), ["mutators[0].name: found 3"]),
}
COUNTS = {
    "repeat-huge": (_made("Repeat", "at: {type: ReLU}, counts: [1, 1000000000]"), ["counts=[1, 1000000000]", "1000"]),
    "repeat-negative": (_made("Repeat", "at: {type: ReLU}, counts: [-1]"), ["counts=[-1]"]),
    "repeat-none": (_made("Repeat", "at: {type: ReLU}, counts: 3"), ["mutators[0].counts: found 3"]),
    "grow-huge": (
        _made("Grow", "at: {type: ReLU}, steps: 1000000000, mutators: {n: null}"),
        ["steps=1000000000", "1000"],
    ),
    "grow-negative": (_made("Grow", "at: {type: ReLU}, steps: -1, mutators: {n: null}"), ["steps=-1"]),
    "grow-text": (_made("Grow", "at: {type: ReLU}, steps: '4', mutators: {n: null}"), ["mutators[0].steps: found '4'"]),
    "cell-huge": (
        _made("Cell", f"at: {{type: ReLU}}, candidates: {RELU}, end: sum, num_nodes: 1000000"),
        ["num_nodes=1000000"],
    ),
    "cell-inputs": (
        _made("Cell", f"at: {{type: ReLU}}, candidates: {RELU}, end: sum, num_nodes: 2, num_inputs: 1000000"),
        ["num_inputs=1000000"],
    ),
    "cell-fraction": (
        _made("Cell", f"at: {{type: ReLU}}, candidates: {RELU}, end: sum, num_nodes: .nan"),
        ["mutators[0].num_nodes: found nan"],
    ),
    "most": (_made("Input", "at: {type: ReLU}, sources: '**', most: -1"), ["most=-1"]),
    "inputs-huge": (
        _space(settings="base: {_target_: torch.nn.ReLU}, inputs: [2000000000, 2000000000], "),
        ["inputs: found"],
    ),
    "inputs-many": (_space(settings="base: {_target_: torch.nn.ReLU}, inputs: [100000, 100000], "), ["inputs: found"]),
    "cells": (
        _made("Cell", f"at: {{type: ReLU}}, candidates: {RELU}, end: sum, num_nodes: 100, num_inputs: 26"),
        ["2,000 nodes more than the base has"],
    ),
}
SPACES: dict[str, tuple[str, list[str]]] = {
    f"{kind}:{name}": (BASE + lines, words)
    for kind, group in (
        ("places", PLACES), ("candidates", CANDIDATES), ("decisions", DECISIONS), ("counts", COUNTS),
    )
    for name, (lines, words) in group.items()
}  # fmt: skip
