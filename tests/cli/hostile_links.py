"""Run folders whose names lead elsewhere, or are no names that one expects."""

import os
import shutil
import socket
from pathlib import Path

from tests.cli.hostile_folders import ESCAPE, LAUGHS, SECRET, hostile
from tests.cli.hostile_folders import _link as link

READ = ("config.yaml", "summary.json", "provenance.json", "metrics.csv", "recipe.yaml", "overrides.txt", "graph.mmd")


def _all_to(run: Path, target: str) -> None:
    for name in READ:
        link(run / name, Path(target))


@hostile
def links_to_devices_without_end(run: Path, outside: Path) -> None:
    _all_to(run, "/dev/zero")


@hostile
def links_to_the_input(run: Path, outside: Path) -> None:
    _all_to(run, "/dev/stdin")


@hostile
def links_to_the_terminal(run: Path, outside: Path) -> None:
    _all_to(run, "/dev/tty")


@hostile
def links_to_the_environment(run: Path, outside: Path) -> None:
    for name in ("recipe.yaml", "overrides.txt"):
        link(run / name, Path("/proc/self/environ"))
    link(run / "report.html", Path("/proc/self/fd/2"))


@hostile
def links_to_open_files(run: Path, outside: Path) -> None:
    for name in ("metrics.csv", "report.html", "summary.json"):
        link(run / name, Path("/proc/self/fd/1"))
    link(run / "report", Path("/proc/self/cwd"))


@hostile
def links_by_way_of_the_process(run: Path, outside: Path) -> None:
    for name in ("recipe.yaml", "overrides.txt"):
        link(run / name, Path(f"/proc/self/root{outside}/secret.txt"))


@hostile
def chains_of_links(run: Path, outside: Path) -> None:
    """Each link leads to the next one, in the folder; the last one out of it."""
    (run / "chain").mkdir()
    link(run / "chain" / "0", outside / "secret.txt")
    for index in range(1, 30):
        link(run / "chain" / str(index), Path(str(index - 1)))
    for name in ("recipe.yaml", "overrides.txt", "report.html"):
        link(run / name, Path("chain/29"))


@hostile
def links_out_and_in_again(run: Path, outside: Path) -> None:
    link(run / "recipe.yaml", Path("..") / ".." / ".." / ".." / "outside" / "secret.txt")
    link(run / "artifacts", Path("..") / ".." / ".." / ".." / "outside" / ".." / "outside")


@hostile
def a_link_to_the_root(run: Path, outside: Path) -> None:
    link(run / "artifacts", Path("/"))
    link(run / "report", Path("/"))


@hostile
def links_of_a_neighbouring_name(run: Path, outside: Path) -> None:
    """Its path begins as the folder's does."""
    neighbour = run.with_name(run.name + "-of-another")
    neighbour.mkdir()
    (neighbour / "secret.txt").write_text(SECRET)
    for name in ("recipe.yaml", "overrides.txt", "report.html"):
        link(run / name, neighbour / "secret.txt")
    (outside / "neighbour").symlink_to(neighbour)


@hostile
def links_that_look_like_temporary_files(run: Path, outside: Path) -> None:
    for name in ("config.yaml", "summary.json", "report.html"):
        link(run / f".{name}.0123456789abcdef.tmp", outside / "secret.txt")
    (run / "checkpoints" / ".last.ckpt.x.tmp").mkdir()


@hostile
def folders_that_look_like_temporary_files(run: Path, outside: Path) -> None:
    (run / ".config.yaml.x.tmp").mkdir()
    (run / "checkpoints" / ".last.ckpt.x.tmp").mkdir()


@hostile
def a_run_that_is_a_link(run: Path, outside: Path) -> None:
    """The folder of the name is one of another place; who names it reads it, `auto` does not."""
    place = outside.with_name("elsewhere")
    run.rename(place)
    run.symlink_to(place)


@hostile
def pipes_everywhere(run: Path, outside: Path) -> None:
    for name in (*READ, ".lock", "log.txt", "job.json", "sweep.json", "plan.json", "multirun.yaml", "report.html"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)


@hostile
def pipes_where_folders_belong(run: Path, outside: Path) -> None:
    for name in ("artifacts", "checkpoints", "report", "tensorboard", "wandb"):
        shutil.rmtree(run / name, ignore_errors=True)
        os.mkfifo(run / name)


@hostile
def sockets(run: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(run)
    for name in ("metrics.csv", "config.yaml", "recipe.yaml", "report.html"):
        Path(name).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(name)
    os.chdir(here)


@hostile
def files_where_folders_belong(run: Path, outside: Path) -> None:
    for name in ("artifacts", "checkpoints", "report", "tensorboard", "wandb"):
        shutil.rmtree(run / name, ignore_errors=True)
        (run / name).write_text("x")


@hostile
def folders_where_files_belong(run: Path, outside: Path) -> None:
    for name in ("metrics.csv", "recipe.yaml", "overrides.txt", "provenance.json", "graph.mmd", "report.html"):
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()
        (run / name / "inside").write_text("x")


@hostile
def a_summary_that_is_a_folder(run: Path, outside: Path) -> None:
    (run / "summary.json").unlink()
    (run / "summary.json").mkdir()


@hostile
def pictures_that_are_folders(run: Path, outside: Path) -> None:
    (run / "report" / "loss-classifier.svg").mkdir(parents=True)
    (run / "report" / "accuracy.svg").mkdir(parents=True)


@hostile
def names_of_commands(run: Path, outside: Path) -> None:
    names = (
        f"{ESCAPE}",
        "a\nb",
        "'\"`$(touch made)`",
        "<script>alert(1)<",
        "%2e%2e%2f",
        "x" * 250,
        "-rf",
        "${oc.env:HOME}",
    )
    for name in names:
        for folder in ("artifacts", "checkpoints", "report"):
            (run / folder).mkdir(exist_ok=True)
            for suffix in (".npz", ".json", ".ckpt"):
                (run / folder / f"{name[:250]}{suffix}".replace("/", "_")).write_text("x")
        (run / "artifacts" / f"parallel_{name[:200]}.json".replace("/", "_")).write_text('{"spans": 3}')


@hostile
def names_that_are_no_texts(run: Path, outside: Path) -> None:
    for name in (b"\xff\xfe.npz", b"parallel_\xff.json", b"\xe2\x80\xae.npz"):
        (run / "artifacts" / os.fsdecode(name)).write_text("x")
    (run / "checkpoints" / os.fsdecode(b"\xff.ckpt")).write_text("x")
    (run / os.fsdecode(b"\xff\x1b[2J")).mkdir()


@hostile
def files_without_end(run: Path, outside: Path) -> None:
    for index in range(3_000):
        (run / "artifacts" / f"{index}.npz").write_text("x")
        (run / "artifacts" / f"parallel_{index}.json").write_text("{}")


@hostile
def folders_without_end(run: Path, outside: Path) -> None:
    deep = run / "artifacts"
    for _ in range(400):
        deep /= "d" * 8
    deep.mkdir(parents=True)


@hostile
def loggers_of_a_stranger(run: Path, outside: Path) -> None:
    """What W&B would read as settings, in the folder that it writes to."""
    (run / "wandb").mkdir()
    (run / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\nmode = online\nentity = other\n")
    (run / "wandb" / "offline-run-20260101_000000-..%2f..%2fx").mkdir()
    (run / "wandb" / f"offline-run-x-{ESCAPE}".replace("/", "")).mkdir()
    (run / "wandb" / "run-y").mkdir()


@hostile
def a_stranger_s_own_mlotool(run: Path, outside: Path) -> None:
    """Code beside the run, which no import finds."""
    for name in ("mlotool", "torch", "sitecustomize"):
        (run / f"{name}.py").write_text(f"import os; os.mkdir({str(outside / 'made')!r})\n")
    (run / "recipe.yaml").write_text(LAUGHS)


@hostile
def everything_is_empty(run: Path, outside: Path) -> None:
    for file in run.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


@hostile
def everything_is_noise(run: Path, outside: Path) -> None:
    for file in run.rglob("*"):
        if file.is_file():
            file.write_bytes(bytes(range(256)) * 40)
