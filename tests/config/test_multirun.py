import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlotool

PROGRAM = """
import sys
import hydra
from mlotool.config import CONFIG_NAME, VERSION_KEYWORDS, check, package_dir, register_sources

register_sources()

@hydra.main(config_path=str(package_dir("conf")), config_name=CONFIG_NAME, **VERSION_KEYWORDS)
def main(config):
    from hydra.core.hydra_config import HydraConfig
    check(config)
    algorithm = config.hypergradient._target_.rpartition(".")[2]
    print(config.name, config.seed, algorithm, HydraConfig.get().runtime.output_dir)

main()
"""


def _run(folder: Path, *words: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(mlotool.__file__).parents[1])},
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    return result.stdout.splitlines()


def test_a_sweep_over_recipes_and_groups(folder: Path) -> None:
    lines = _run(folder, "-m", "+recipe=mwn,data_cleaning", "hypergradient=cg,first_order")
    assert [line.split()[:3] for line in lines] == [
        ["mwn", "0", "Implicit"],
        ["mwn", "0", "FirstOrder"],
        ["data_cleaning", "0", "Implicit"],
        ["data_cleaning", "0", "FirstOrder"],
    ]
    assert [Path(line.split()[3]).name for line in lines] == ["0", "1", "2", "3"]
    assert not list(folder.rglob("*.log"))


def test_a_sweep_of_the_recipe_s_own(write_recipe: Callable[..., Path], folder: Path) -> None:
    write_recipe("defaults: [mwn, _self_]\nname: mine\nhydra: {sweeper: {params: {seed: '5,6'}}}\n")
    lines = _run(folder, "-m", "+recipe=mine")
    assert [line.split()[:2] for line in lines] == [["mine", "5"], ["mine", "6"]]
    assert all("outputs/mine/multirun/" in line for line in lines)


def test_a_single_run_goes_to_a_folder_of_its_name(folder: Path) -> None:
    [line] = _run(folder, "+recipe=mwn")
    assert "outputs/mwn/2" in line
