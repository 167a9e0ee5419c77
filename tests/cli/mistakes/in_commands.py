"""In commands: words, folders and files that are not what the verb expects."""

from pathlib import Path

from omegaconf import OmegaConf

from mlotool.config import compose
from tests.cli.mistakes.mistake import Mistake

PLAIN = """\
# @package _global_
defaults: [plain, _self_]
runner: {max_ticks: 1, progress_bar: false, report: false}
logger: {wandb: false}
"""


def _typed(*words: str, says: tuple[str, ...], code: int = 2, leaves: tuple[str, ...] = ()) -> Mistake:
    return Mistake(words, says, code, {"odd.yaml": PLAIN}, _folders, leaves)


def _run(*words: str, says: tuple[str, ...], code: int = 2, leaves: tuple[str, ...] = ()) -> Mistake:
    return _typed("run", "odd.yaml", *words, says=says, code=code, leaves=leaves)


def _folders(folder: Path) -> None:
    """Make an empty folder, and one of another program."""
    (folder / "empty").mkdir()
    other = folder / "other" / "checkpoints"
    other.mkdir(parents=True)
    (other.parent / "config.yaml").write_text("model: resnet\ntrainer: {epochs: 3}\n")
    (other.parent / "metrics.csv").write_text("epoch,loss\n1,2\n")
    (other / "best.ckpt").write_bytes(b"abc")


def _of_run(*words: str, says: tuple[str, ...]) -> Mistake:
    return Mistake(words, says, 2, {"odd.yaml": PLAIN}, _run_folder)


def _run_folder(folder: Path) -> None:
    """Make what of a run's folder a recipe could be taken for."""
    (folder / "run").mkdir()
    config = OmegaConf.to_yaml(compose(str(folder / "odd.yaml")), resolve=True)
    for path in ("run/config.yaml", "moved.yaml"):
        (folder / path).write_text(config)
    (folder / "run" / "provenance.json").write_text("{}")


def _of_sweep(*words: str, says: tuple[str, ...], optuna: bool = True) -> Mistake:
    search = ("sweep=optuna", "sweep.num_trials=2") if optuna else ()
    return _run("-m", *search, *words, says=says)


def _sweep_folder(folder: Path) -> None:
    """Make what of a sweep's folder counts where another one is to begin or to go on there."""
    (folder / "swept").mkdir()
    (folder / "swept" / "multirun.yaml").write_text("hydra: {overrides: {task: [+recipe=plain, 'seed=0,1']}}\n")


OVERRIDE = "expected key=value"
RATE = "problems.classifier.optimizer.lr"
MISTAKES = {
    "spaces around the equals sign": _run(
        "seed", "=", "3", says=("Found two recipes", "Write an override as key=value")
    ),
    "a colon": _run("seed:3", says=("Found two recipes, 'odd' and 'seed:3'", "key=value")),
    "an override as an option": _run("--seed=3", says=("unknown argument '--seed=3'",)),
    "an empty word": _typed("run", "", says=("needs a recipe",)),
    "two recipes": _typed("run", "plain", "odd.yaml", says=("Found two recipes, 'plain' and 'odd'",)),
    "a key twice": _run(
        "seed=1", "seed=2", says=("warning: seed: found seed=1, and later seed=2",), code=0, leaves=("run",)
    ),
    "--cfg with -m": _run("-m", "seed=0,1", "--cfg", "job", says=("--cfg: not allowed with argument -m",)),
    "--info of nothing": _run("--info", "everything", says=("invalid choice: 'everything'",)),
    **{
        f"no {key}": _run(f"{key}=null", says=(f"{key}: found null; expected {expected}",))
        for key, expected in {
            "data": "the name of an option",
            "hypergradient": "the name of an option",
            "graph": "keys out of upper_to_lower, lower_to_upper",
            "problems": "a mapping",
            "evaluate.splits": "a mapping",
            "problems.classifier.stream.split": "a text",
        }.items()
    },
    "a name of 300 letters": _run(f"name={'a' * 300}", says=("name: found 300 characters", "expected at most 100")),
    "a folder of 300 letters": _run(f"hydra.run.dir={'a' * 300}", says=("File name too long", "Shorten it"), code=1),
    "a sweep of nothing": _run("-m", "seed=range(5,0)", says=("seed: found no value in seed=range(5,0)",)),
    "a sweep without end": _run("-m", "seed=range(0,1000000000)", says=("has 1000000000 values; expected at most",)),
    "a step of zero": _run(
        "-m", "seed=range(0,3,0)", says=("seed: found the step 0 in seed=range(0,3,0)", "Write seed=range(0,3).")
    ),
    "a seed twice": _run("-m", "seed=0,0", says=("seed: found 0 twice in seed=0,0", "each once")),
    "a sweep over names": _run("-m", "name=a,b", says=("name: found name=a,b; expected one name",)),
    "a sweep over workers": _run(
        "-m", "sweep.workers=1,2", says=("sweep.workers: found sweep.workers=1,2", "Write sweep.workers=<one value>")
    ),
    **{
        f"{fuse} jobs in a process": _run(
            "-m",
            "seed=0,1",
            f"sweep.fuse={fuse}",
            says=(f"sweep.fuse: found {said}; expected a whole number of", "or auto"),
        )
        for fuse, said in {
            "": "nothing",
            "0": "0",
            "2.5": "2.5",
            "many": "many",
            "null": "null",
            "true": "True",
            "[2]": "[2]",
        }.items()
    },
    "a sweep over kinds of sweeps": _run("-m", "sweep=grid,optuna", says=("sweep: found sweep=grid,optuna",)),
    "options for no launcher": _run(
        "-m",
        "seed=0,1",
        "sweep.launcher_options={timeout_min: 3}",
        says=("sweep.launcher_options: found {'timeout_min': 3} with sweep.launcher=local", "slurm or ray"),
    ),
    "a tag that is none": _run(
        "-m",
        "sweep=optuna",
        "problems.classifier.optimizer.lr=tag(lgo, interval(0.1, 1))",
        says=("found the tag 'lgo'", "Did you mean 'log'?"),
    ),
    "ticks below zero": _run("runner.max_ticks=-5", says=("runner.max_ticks: found -5; expected a whole number",)),
    "nan ticks": _run("runner.max_ticks=nan", says=("runner.max_ticks: found nan",)),
    "half precision by a number": _run("runner.precision=16", says=("found '16'", "Did you mean 'fp16'?")),
    "a folder of results that does not exist as a key": _run("output_dir=x", says=("unknown key 'output_dir'",)),
    "an interval in a grid": _run("-m", "seed=interval(0,9)", says=("in a grid", "add sweep=optuna")),
    "trust in a file": _run("--trust", "mypackage/losses.py", says=("no path. Write --trust mypackage.",)),
    "trust in a path": _run("--trust", "./mypackage", says=("no path. Write --trust mypackage.",)),
    "trust in a package with a dash": _run("--trust", "my-package", says=("Rename the folder to my_package",)),
    "trust in a package of Python's": _run(
        "--trust", "random", says=("'random' is a package of Python", "rename yours")
    ),
    "trust in a submodule": _run("--trust", "mypackage.losses", says=("Write --trust mypackage.",)),
    "trust in an empty folder": _run("--trust", "empty", says=("without an __init__.py", "empty/__init__.py")),
    "resume of an empty folder": _run("resume=empty", says=("resume: found 'empty', which has no config.yaml",)),
    "resume of a recipe": _run("resume=odd.yaml", says=("resume: found 'odd.yaml', which is in no run folder",)),
    "resume=true": _run("resume=true", says=("resume: found 'True', which does not exist; expected auto",)),
    "resume of another program's run": _run("resume=other", says=("resume: found 'other'",)),
    "a sweep that resumes a folder of no sweep": _run("-m", "seed=0,1", "resume=empty", says=("has no multirun.yaml",)),
    "evaluate of another program's run": _typed("evaluate", "other", "--split", "val", says=("other",)),
    "the config of a run as a recipe": _of_run(
        "run", "run/config.yaml", says=("run/config.yaml: found the config of a run", "mlotool run run/recipe.yaml")
    ),
    "the config of a run as a choice": _of_run(
        "run", "+recipe=run/config.yaml", says=("found the config of a run", "the same with resume=run.")
    ),
    "the config of a run elsewhere": _of_run(
        "validate", "moved.yaml", says=("moved.yaml: found the config of a run", "mlotool evaluate FOLDER --split test")
    ),
    "the folder of a run as a recipe": _of_run(
        "run", "run", says=("recipe: found 'run', the folder of a run", "mlotool evaluate run --split test")
    ),
    "evaluate of a recipe": _typed("evaluate", "plain", "--split", "val", says=("plain",)),
    "evaluate without a split": _typed("evaluate", "other", says=("--split",)),
    "report of another program's run": _typed("report", "other", says=("its config.yaml has no problems",)),
    "report of a file": _typed("report", "odd.yaml", says=("found a file", "that `mlotool run` printed")),
    "report of an empty folder": _typed("report", "empty", says=("found an empty folder",)),
    "report of two": _typed("report", "other", "empty", says=("unknown argument 'empty'",)),
    "copy onto itself": _typed("copy", "odd.yaml", "odd.yaml", says=("odd.yaml exists already",)),
    "copy to a text file": _typed("copy", "plain", "mine.txt", says=("found the ending '.txt'", "mine.yaml")),
    "copy below a file": _typed("copy", "plain", "odd.yaml/mine.yaml", says=("odd.yaml/mine.yaml: cannot be written",)),
    "copy from FTP": _typed("copy", "ftp://example.org/x.yaml", says=("expected one of http:// or https://",)),
    "check of one level": _typed("check", "plain", says=("no problem shapes another", "try: mlotool check mwn")),
    "check of negative ticks": _typed("check", "mwn", "--ticks", "-5", says=("--ticks: found -5",)),
    "validate of a folder": _typed("validate", "mypackage", says=("found 'mypackage'", "mlotool list")),
    "validate of a file of another ending": _typed("validate", "odd.yml", says=("Did you mean", "odd.yaml")),
    "another program's key": _run("max_epochs=3", says=("unknown key 'max_epochs'", "Did you mean runner.max_ticks?")),
    "a rate without its place": _run("lr=0.1", says=("Did you mean problems.<name>.optimizer.lr?",)),
    "a key in capitals": _run("SEED=3", says=("unknown key 'SEED'", "Did you mean 'seed'?")),
    "a recipe in capitals": _typed("run", "PLAIN", says=("recipe: found 'PLAIN'", "'plain'")),
    "an optimizer's option in the place of a node": _run(
        "problems.classifier.optimizer=adam",
        says=("found 'adam'; expected a node", "+optimizer@problems.classifier.optimizer=adam on the command line"),
    ),
    "a reference to nothing": _run(
        f"{RATE}=${{rate}}", says=(f"{RATE}: found ${{rate}} (Interpolation key 'rate' not found)",)
    ),
    "a reference to the environment": _run(
        "seed=${oc.env:NO_SUCH_VARIABLE}",
        says=("seed: found ${oc.env:NO_SUCH_VARIABLE}", "Environment variable 'NO_SUCH_VARIABLE' not found"),
    ),
    "a recipe and an override in one word": _typed(
        "run", "plain seed=3", says=("Found 'plain seed=3', which has a space before its =", "word of its own")
    ),
    "a home that the shell leaves": _typed("run", "~/no_such.yaml", says=("recipe: found '~/no_such.yaml'",)),
    "a setting with dashes and a space": _run("--resume", "auto", says=("settings have no dashes: write resume=..",)),
    "a folder that Hydra enters": _run("hydra.job.chdir=true", says=("hydra.job.chdir: found true; expected false",)),
    "a folder of groups that is not there": _run("-cd", "nowhere", says=("--config-dir: found", "is not there")),
    "a part of the config that is not there": _run(
        "--cfg", "job", "--package", "problms", says=("--package: found 'problms'", "Did you mean 'problems'?")
    ),
    "the folder of single runs for a sweep": _of_sweep(
        "seed=0,1",
        "hydra.run.dir=x",
        "max_ticks=2",
        says=("hydra.run.dir: found x with -m", "unknown key"),
        optuna=False,
    ),
    "a folder with a sweep for another one": Mistake(
        ("run", "-m", "odd.yaml", "seed=2,3", "hydra.sweep.dir=swept"),
        ("hydra.sweep.dir: found swept, which holds a sweep already", "resume=swept"),
        2,
        {"odd.yaml": PLAIN},
        _sweep_folder,
    ),
    "a sweep of another recipe to go on with": Mistake(
        ("run", "-m", "odd.yaml", "seed=0,1", "resume=swept"),
        ("resume: found 'swept', a sweep of recipe=plain, with recipe=odd",),
        2,
        {"odd.yaml": PLAIN},
        _sweep_folder,
    ),
    "jobs in one folder": Mistake(
        ("run", "-m", "odd.yaml", "seed=0,1", "hydra.sweep.dir=outputs/x", "hydra.sweep.subdir=y"),
        ("holds a run already; expected a new or empty folder",),
        2,
        {"odd.yaml": PLAIN},
        leaves=("run",),
    ),
    "a name with a space for a sweep": _of_sweep("seed=0,1", "name='a b'", says=("name: found 'a b'",), optuna=False),
    "settings of a search in a grid": Mistake(
        ("run", "-m", "odd.yaml", "seed=0,1", "sweep.num_trials=5"),
        ("warning: sweep.num_trials: found it in a grid, which runs every combination", "Add sweep=optuna"),
        0,
        {"odd.yaml": PLAIN},
        leaves=("run",),
    ),
    "an unknown key in a search": _of_sweep("lr=interval(0.1,1)", says=("unknown key 'lr'",)),
    "an unknown key of the search": _of_sweep(
        f"{RATE}=interval(0.1,1)", "+sweep.direction=maximize", says=("sweep.direction: unknown key 'direction'",)
    ),
    "an interval below zero": _of_sweep(f"{RATE}=interval(-1,-0.5)", says=(f"{RATE}: found -1.0", "at least 0")),
    "an interval with fractions for whole numbers": _of_sweep(
        "runner.max_ticks=interval(1.5,3.5)", says=("numbers with a fraction are drawn", "int(interval(")
    ),
    "every value of an interval": _of_sweep(
        f"{RATE}=interval(0.1,1)", "sweep.sampler=brute_force", says=(f"{RATE}: found an interval", "another sampler")
    ),
    "a seed for the sampler": _of_sweep(
        f"{RATE}=interval(0.1,1)",
        "sweep.sampler_options={seed: 3}",
        says=("sweep.sampler_options.seed: found 3", "Write sweep.seed=.."),
    ),
    "a copy with an override": _typed("copy", "plain", "seed=3", says=("'seed=3': found an override",)),
    "a verb twice": _typed("run", "run", "odd.yaml", says=("Found two recipes, 'run' and 'odd'",)),
    "a verb in capitals": _typed("RUN", "plain", says=("Unknown verb 'RUN'",)),
}
