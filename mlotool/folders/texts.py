"""Text files by domain. No torch."""

from pathlib import Path


def files_by_domain(path: Path, pattern: str) -> dict[str, list[Path]]:
    """Return the files with text in it by domain, both in the order of their names.

    A file in a subfolder of `path`, at any depth, is of the domain that has that subfolder's name; one beside the
    subfolders is of a domain with the name of `path` itself.

    Args:
        path: a file, or a folder.
        pattern: of the files in a folder: `**/*.txt`.

    Raises:
        OSError, ValueError, NotImplementedError: the folder cannot be read, or the pattern is none.
    """
    files = [path] if path.is_file() else sorted(file for file in path.glob(pattern) if file.is_file())
    domains: dict[str, list[Path]] = {}
    for file in files:
        inner = file.relative_to(path).parts if path.is_dir() else ()
        if file.stat().st_size:
            domains.setdefault(inner[0] if len(inner) > 1 else path.absolute().stem, []).append(file)
    return dict(sorted(domains.items()))
