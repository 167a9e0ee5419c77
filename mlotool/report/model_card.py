"""README.md of an exported model: what it is, how it was made, what it reaches, and how it is loaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mlotool.core.messages import escape
from mlotool.folders.hub import WEIGHTS
from mlotool.folders.run_folder import RunFolder
from mlotool.report.compared_runs import ComparedRun
from mlotool.report.formats import number
from mlotool.report.recorded_run import RecordedRun, as_dict
from mlotool.report.sweep import job_command, trusted_packages

FILE, MAX_METRICS, MAX_DATA_LINES = "README.md", 30, 40
_ADAPTER = "adapter_config.json"
_PEFT = {"SEQ_CLS": "AutoPeftModelForSequenceClassification", "CAUSAL_LM": "AutoPeftModelForCausalLM"}


def model_card(run_dir: Path, problem: str, folder: Path, checkpoint: str, num_parameters: int) -> str:
    """Return the text of a model card, in Markdown with the front matter that hubs read.

    Args:
        run_dir: of the run.
        problem: whose module was exported.
        folder: with the exported weights.
        checkpoint: "best" or "last".
        num_parameters: of the module.
    """
    compared = ComparedRun("", run_dir)
    run, node = compared.run, as_dict(as_dict(compared.run.problems.get(problem)).get("module"))
    adapter = _json(folder / _ADAPTER)
    library = "peft" if adapter else "transformers" if (folder / "config.json").is_file() else "mlotool"
    front: dict[str, Any] = {"library_name": library, "tags": ["mlotool", "bilevel-optimization"]}
    if isinstance(base := adapter.get("base_model_name_or_path"), str) and base:
        front["base_model"] = base
    is_best = checkpoint == "best" and run.best_tick is not None
    tick = run.best_tick if is_best else run.summary.get("num_ticks")
    taken, which = (compared.best, "best") if is_best else (compared.last, "last")
    seed = number(run.provenance.get("seed", run.config.get("seed")))
    versions = ", ".join(f"{name} {version}" for name, version in as_dict(run.provenance.get("versions")).items())
    commit = as_dict(run.provenance.get("git")).get("commit")
    lines = [
        "---", yaml.safe_dump(front, sort_keys=False).strip(), "---", "",
        f"# {_plain(run.name)}: {_plain(problem)}", "",
        *([_plain(_summary(run.recipe)), ""] if _summary(run.recipe) else []),
        f"The module of the problem `{_plain(problem)}` of a run of the recipe `{_plain(run.name)}`: "
        f"`{_plain(node.get('_target_'))}`, {num_parameters:,} parameters, as it was at the {which} checkpoint, after "
        f"tick {number(tick)} of {number(run.summary.get('num_ticks'))}. It was trained with mlotool, a toolkit for "
        f"bilevel and multilevel optimization.{_levels(run.config, problem)}",
        "", "## Results", "", *_results(compared, taken), "",
        "## Load it", "", *_block("python", _loading(folder, library, node)), "",
        "With mlotool and the run's folder: "
        f'`mlotool.load("RUN", "{_plain(problem)}", "{checkpoint}"{_trust(run)})`.', "",
        "## How it was made", "", *_block("bash", [_command(run)]), "",
        f"The seed is {seed}. `config.yaml` has every setting, and `recipe.yaml` the recipe. The data:", "",
        *_block("yaml", _data(run.config)), "",
        f"Versions: {_plain(versions)}." + (f" Commit: {_plain(commit)}." if commit else ""),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _results(compared: ComparedRun, taken: Mapping[str, Any]) -> list[str]:
    objective = compared.run.objective
    better = {"max": "larger is better", "min": "smaller is better"}.get(str(objective.get("mode")), "")
    problems = compared.run.problems
    keys = [key for key in taken if key == objective.get("key") or key.partition("/")[0] not in problems]
    rows = [
        f"| {_plain(key)}{f' (objective, {better})' * (key == objective.get('key'))} | {number(taken[key].value)} "
        f"| {number(taken[key].tick)} |"
        for key in keys[:MAX_METRICS]
    ]
    return ["| metric | value | at tick |", "|---|---|---|", *rows] if rows else ["The run has evaluated nothing."]


def _loading(folder: Path, library: str, node: Mapping[str, Any]) -> list[str]:
    if library == "peft":
        # It finds the base by the path or name in adapter_config.json.
        kind = _PEFT.get(str(_json(folder / _ADAPTER).get("task_type")), "AutoPeftModel")
        is_known = kind.endswith("Classification") and isinstance(node.get("num_classes"), int)
        labels = f", num_labels={node['num_classes']}" if is_known else ""
        return [f"from peft import {kind}", "", f'model = {kind}.from_pretrained("FOLDER"{labels})']
    if library == "transformers":
        classes = _json(folder / "config.json").get("architectures")
        kind = classes[0] if isinstance(classes, list) and classes and str(classes[0]).isidentifier() else "AutoModel"
        return [f"from transformers import {kind}", "", f'model = {kind}.from_pretrained("FOLDER")']
    read = ["from safetensors.torch import load_file"]
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    home, _, name = str(node.get("_target_")).rpartition(".")
    if not home or "_target_" in json.dumps(arguments, default=str) or "_args_" in arguments:
        # It is built of other nodes, which config.yaml describes.
        return [*read, "", f'tensors = load_file("{WEIGHTS}")  # by name, of the module in config.yaml']
    call = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    return [*read, f"from {home} import {name}", "", f"model = {name}({call})",
            f'model.load_state_dict(load_file("{WEIGHTS}"))']  # fmt: skip


def _levels(config: Mapping[str, Any], problem: str) -> str:
    """Return in a sentence which problems stand above and below."""
    upper = as_dict(as_dict(config.get("graph")).get("upper_to_lower"))
    above = [str(name) for name, below in upper.items() if isinstance(below, list) and problem in below]
    below = upper.get(problem)
    facts = [f"the upper problem{'s' * (len(above) > 1)} {', '.join(above)} shaped its training"] if above else []
    if isinstance(below, list) and below:
        facts.append(f"it shaped the training of {', '.join(map(str, below))}")
    return f" In that run {', and '.join(facts)}." if facts else ""


def _data(config: Mapping[str, Any]) -> list[str]:
    text = yaml.safe_dump({"data": config.get("data")}, sort_keys=False, allow_unicode=True)
    return text.splitlines()[:MAX_DATA_LINES]


def _command(run: RecordedRun) -> str:
    """Return the command of a run; of the job of a sweep, one for it alone."""
    command = str(run.provenance.get("command") or "# The command was not recorded.")
    return job_command(run) if {"-m", "--multirun"} & set(command.split()) else command


def _trust(run: RecordedRun) -> str:
    packages = trusted_packages(run)
    return f", trust={[_plain(package) for package in packages]}" if packages else ""


def _summary(recipe: str) -> str:
    """Return the first line of a recipe's header."""
    lines = [line.lstrip("# ").strip() for line in recipe.splitlines()[:20] if line.startswith("#")]
    return next((line for line in lines if line and not line.startswith(("@", "copied from"))), "")


def _block(language: str, lines: list[Any]) -> list[str]:
    """Return lines as a block of code, which no line of them can end."""
    return [f"```{language}", *(escape(str(line)).replace("```", "'''").replace("\n", " ") for line in lines), "```"]


def _plain(text: object) -> str:
    """Return a text of anybody's on one line, without what Markdown or HTML would obey."""
    return "".join(letter for letter in escape(" ".join(str(text).split())) if letter not in "<>`|[]")


def _json(path: Path) -> dict[str, Any]:
    try:
        return as_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def copied_files(run: RunFolder) -> dict[str, str]:
    """Return the texts of the run's folder that lie beside the weights, by name."""
    names = (run.CONFIG, run.RECIPE, run.NODES)
    texts = {name: run.text(name, 2_000_000) for name in names}
    return {name: text for name, text in texts.items() if text is not None}
