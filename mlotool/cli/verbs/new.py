"""Write a package into the working folder, for your own model, loss and data.

It has a model, a loss, a data set, a metric, a recipe that uses them, and tests. It can be trained at once: the lower
problem is a classifier, some of whose training labels are wrong, and the upper problem learns how often. Change what
you need.

  mlotool new mypackage
"""

import keyword
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from mlotool.cli.arguments import VerbParser
from mlotool.config.schema import is_identifier
from mlotool.core import errors, messages
from mlotool.folders import files

# The template's name, which gives way to that of the new package in all its texts and file names.
TEMPLATE = "mypackage"
# Folders of the working folder in which mlotool itself looks or writes.
_TAKEN = ("recipes", "conf", "outputs", "datasets", "wandb")
_MAX_NAME = 60


def main(words: list[str]) -> int:
    """Write the package; 2 where the name cannot be one, or something has it already."""
    parser = VerbParser("new", __doc__)
    parser.add_argument("name", metavar="NAME", help="of the package: a Python name, such as mypackage")
    name = parser.parse(words).name
    check_name(name)
    folder = Path(name)
    write_package(folder, name)
    files = ", ".join(sorted(path.name for path in folder.iterdir() if path.name != "__init__.py"))
    print(f"wrote {name}/: {files}\n\nnext, from this folder:")
    recipe = f"{name}/{name}.yaml --trust {name}"
    install = [] if find_spec("pytest") else ["python -m pip install pytest"]
    commands = (f"mlotool run {recipe}", f"mlotool validate {recipe} --targets", *install, f"python -m pytest {name}")
    print("\n".join(f"  {command}" for command in commands))
    return 0


def check_name(name: str) -> None:
    """Raise a ConfigError where a package in the working folder cannot have this name."""
    shown, fault = messages.escape(name[:_MAX_NAME]), ""
    if not is_identifier(name) or keyword.iskeyword(name) or len(name) > _MAX_NAME or name.startswith("_"):
        fault = f"found the name '{shown}'; expected a Python name of at most {_MAX_NAME} characters"
    elif name in sys.stdlib_module_names or name in _TAKEN or _is_installed(name):
        fault = f"found the name '{shown}' of a module that is installed, or of a folder that mlotool uses"
    elif taken := [path for path in (Path(name), Path(f"{name}.py")) if path.exists() or path.is_symlink()]:
        fault = f"found '{taken[0]}' in the working folder already; expected a name that is free there"
    if fault:
        meant = re.sub(r"\W+", "_", name[:_MAX_NAME], flags=re.ASCII).strip("_") or TEMPLATE
        raise errors.ConfigError(
            f"new: {fault}. Choose another one, such as: mlotool new {f'my_{meant}' if meant == name else meant}"
        )


def write_package(folder: Path, name: str) -> None:
    """Write the template under a name, whole or not at all.

    Raises:
        WriteError: the disk does not take it.
    """
    template = Path(__file__).parents[2] / "templates" / TEMPLATE
    with files.writing(folder):
        folder.mkdir()
        try:
            for source in sorted(template.iterdir()):
                if source.is_file():
                    text = source.read_text(encoding="utf-8").replace(TEMPLATE, name)
                    (folder / source.name.replace(TEMPLATE, name)).write_text(text, encoding="utf-8")
        except BaseException:
            # Made above, by this very call: nobody else's files are in it.
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _is_installed(name: str) -> bool:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):
        return True
    # A folder without __init__.py, which a package of that name would hide, is none; nor is one of the working folder.
    return spec is not None and spec.origin is not None and Path.cwd() not in Path(spec.origin).parents
