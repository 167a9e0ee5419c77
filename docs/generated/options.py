"""The page of every option of conf/: what its file says, and what it sets."""

from pathlib import Path

from docs.generated.keys import SECTIONS

CONF = Path(__file__).parents[2] / "conf"
HEADINGS = {
    "data": "`data=`: data sets",
    "model": "`model@problems.<name>.module=`: models",
    "optimizer": "`optimizer@problems.<name>.optimizer=`: optimizers",
    "hypergradient": "`hypergradient=`: how gradients pass through solutions",
    "parallel": "`+parallel@problems.<name>.parallel=`: layer-parallel training",
    "runner": "`runner=`: length and device",
    "logger": "`logger=`: where numbers go",
    "debug": "`debug=`: limits",
    "sweep": "`sweep=`: many runs",
}


PLACES = {
    "model": "problems.<name>.module",
    "optimizer": "problems.<name>.optimizer",
    "parallel": "problems.<name>.parallel",
}
"""Groups that fill a key of a problem, each with that key; all others fill the root's key of their name."""


def options() -> dict[str, list[Path]]:
    """Return the files of all options, by group."""
    return {group: sorted((CONF / group).glob("*.yaml")) for group in HEADINGS}


def page() -> str:
    """Return the page, in Markdown."""
    lines = [
        "# Every option of conf/",
        "",
        "An option is a file that fills a part of the config. A recipe chooses options in its `defaults`, a command",
        "line by `group=option`; each key of an option can be overridden: `hypergradient=cg",
        "hypergradient.solver.max_iterations=10`.",
    ]
    for group, files in options().items():
        lines += ["", f"## {HEADINGS[group]}", "", _usage(group, files[0].stem)]
        for file in files:
            lines += [
                "",
                f"### `{group}={file.stem}` {{: #{group}-{file.stem} }}",
                "",
                "```yaml",
                file.read_text().strip(),
                "```",
            ]
    return "\n".join(lines) + "\n"


def _usage(group: str, option: str) -> str:
    """Return how an option of a group is chosen."""
    if group not in PLACES:
        section = SECTIONS.get(group, "").lower().replace(" ", "-")
        keys = f" What a file leaves out has its [default](keys.md#{section})." if section else ""
        return f"In a recipe's `defaults`: `- override /{group}: {option}`.{keys}"
    place = PLACES[group]
    return (
        f"On the command line `{group}@{place}={option}`, with a `+` before it where the recipe has chosen none for "
        f"this problem. In a recipe's `defaults`: `- /{group}@{place}: {option}`."
    )
