"""Remember that you trust a Python package of yours: recipes may name its classes and functions without --trust.

  mlotool trust mypackage                       the package of this name in this folder, or an installed one
  mlotool trust                                 list the remembered packages, with their places
  mlotool trust mypackage --remove              forget it

The package is remembered with its place on the disk, in ~/.config/mlotool/trust.json: another package of this name is
not trusted. From then on, any recipe that you run, and any run folder that you evaluate, may use all of its code.
"""

from pathlib import Path

from mlotool.cli.arguments import VerbParser
from mlotool.cli.terminal import nearby, one_line, plain_console, print_table, say
from mlotool.config.security.remembered import FILE, Place, read_places, settings_folder, write_places
from mlotool.config.security.trusted import find_package
from mlotool.core.errors import ConfigError
from mlotool.core.messages import did_you_mean


def main(words: list[str]) -> int:
    """Add, remove or list."""
    parser = VerbParser("trust", __doc__)
    parser.add_argument("package", metavar="PACKAGE", nargs="?", help="its top-level name")
    parser.add_argument("--remove", action="store_true", help="forget it, in all places")
    arguments = parser.parse(words)
    places = read_places()
    if arguments.package is None:
        if arguments.remove:
            parser.error("found --remove without a package")
        _show(places)
        return 0
    change = _removed if arguments.remove else _added
    change(places, arguments.package)
    return 0


def _added(places: dict[str, list[Place]], package: str) -> None:
    place = find_package(package, lambda name: f"mlotool trust {name}")
    known = places.setdefault(package, [])
    if place not in known:
        known.append(place)
    file = write_places(places)
    say(f"trusting {package} in {place.folder} from now on: {nearby(file)}")
    say(f"to forget it: mlotool trust {package} --remove")


def _removed(places: dict[str, list[Place]], package: str) -> None:
    if package not in places:
        known = ", ".join(places) or "none"
        hint = did_you_mean(package, places)
        raise ConfigError(f"trust: found '{package}'; expected a remembered package: {known}.{hint} Correct the name.")
    del places[package]
    write_places(places)
    say(f"{package} is trusted no longer without --trust {package}")


def _show(places: dict[str, list[Place]]) -> None:
    rows = [(package, place) for package, listed in sorted(places.items()) for place in listed]
    if not rows:
        folder = settings_folder()
        where = "" if folder is None else f" in {folder / FILE}"
        print(one_line(f"no package is remembered{where}; add one: mlotool trust PACKAGE"))
        return
    states = ["" if Path(place.file).is_file() else "not there" for _, place in rows]
    columns = [
        ("package", [package for package, _ in rows], True),
        ("in", [str(place.folder) for _, place in rows], True),
        ("", states, False),
    ]
    print_table(plain_console(), columns)
