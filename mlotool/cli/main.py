"""Entry point: finds the verb, and turns what it raises into a message and an exit code."""

import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from mlotool import __version__, cli
from mlotool.cli.terminal import warn
from mlotool.core.errors import ConfigError, MlotoolError
from mlotool.core.messages import bounded, command_line, did_you_mean, escape
from mlotool.core.process import end_with_threads, leave, terminable
from mlotool.core.user_code import MORE_MEMORY, explained, is_out_of_memory
from mlotool.folders.files import cannot_write

# The order of --help. A verb's module is imported only when it is called: --help needs 0.05 s that way.
VERBS = {
    "run": "train a recipe, with all of Hydra: overrides, -m, --cfg job",
    "list": "list the recipes, one line each; also ls",
    "show": "show what a recipe sets (--all: with the defaults), and its graph",
    "validate": "check a recipe without running it",
    "runs": "list the runs below a folder, with objective, ticks and time",
    "compare": "compare runs: the settings that differ, metrics, curves",
    "export": "write a run's model as safetensors, with its config and a model card",
    "trust": "remember a package of yours, so that recipes may use it without --trust",
    "schema": "print the JSON schema of a recipe, with which editors complete and check it",
    "check": "measure a recipe's hypergradients against the most exact ones",
    "copy": "copy a built-in recipe, for you to edit; also cp",
    "new": "write a package for your own model, loss, data and recipe, with tests",
    "evaluate": "evaluate a finished run on any split",
    "report": "write the page and the figures of a finished run again",
    "doctor": "show versions, devices, folders and optional extras of this machine",
}
# What users of other tools type.
ALIASES = {"ls": "list", "cp": "copy"}
EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: without the program's name; None reads `sys.argv`.

    Returns:
        the exit code.
    """
    if arguments is not None:
        return _run(list(arguments))
    open_streams()
    code = _run(sys.argv[1:])
    if "torch" in sys.modules:
        leave(code)
    end_with_threads(code)
    return code


def _run(words: list[str]) -> int:
    debug = "--debug" in words
    code = _ended(words, debug=debug)
    sys.stdout.flush()
    fault = getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "fault", None)
    if fault is not None:
        _say(f"error: stdout: cannot be written ({fault.strerror}); print to another place.", debug=debug)
    return code or (EXIT_FAILURE if fault else 0)


def _ended(words: list[str], *, debug: bool) -> int:
    """Return the exit code of a command, once it has said what went wrong."""
    try:
        with plain_warnings(debug=debug), command_line(), terminable():
            return _dispatch([word for word in words if word != "--debug"])
    except KeyboardInterrupt as interrupted:
        _say("interrupted.", debug=debug)
        # SIGTERM comes as a KeyboardInterrupt too, with a code of its own.
        return int(getattr(interrupted, "exit_code", EXIT_INTERRUPTED))
    except BaseException as error:
        text = _foreseen(error)
        # argparse, after --help; or code of the user's, which has not finished a run so.
        if isinstance(error, SystemExit) and not text:
            return error.code if isinstance(error.code, int) else EXIT_FAILURE
        more = (
            ""
            if text or debug
            else ("\nThis error was not expected. Repeat the command with --debug to see where it happened.")
        )
        _say(f"error: {text or f'{type(error).__name__}: {error}'}{more}", debug=debug)
        return getattr(error, "exit_code", EXIT_FAILURE)


def _foreseen(error: BaseException) -> str:
    """Return what is said of an error that was foreseen; empty for another one."""
    if isinstance(error, MlotoolError):
        return str(error)
    if text := explained(error):
        return text
    if isinstance(error, OSError):
        # A disk that is full or read-only, a file in a folder's place: nothing of ours, whoever met it.
        place = error.filename if isinstance(error.filename, str | bytes) else None
        return str(cannot_write(os.fsdecode(place), error) if place else error.strerror or error)
    return f"{str(error) or 'the memory is exhausted'}. {MORE_MEMORY}" if is_out_of_memory(error) else ""


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        verbs = "\n".join(f"  {verb:<12} {text}" for verb, text in VERBS.items())
        # The help is the docstring of the package, as that of a verb is the docstring of its file.
        print((cli.__doc__ or "").format(verbs=verbs), end="")
        return 0 if words else EXIT_USAGE
    if words[0] == "--version":
        print(f"mlotool {__version__}")
        return 0
    # What Hydra's completion scripts call has no verb; `mlotool run -sc` is what its help says.
    without_verb = words[1:] if words[0] == "run" else words
    if without_verb[:1] in (["-sc"], ["--shell-completion"]):
        return _call("completion", without_verb[1:])
    if words[0] == "rank":
        # One process of a run on several devices, which `mlotool run` starts.
        from mlotool.runner.run_config import serve

        return serve(Path(words[1]))
    words = [ALIASES.get(words[0], words[0]), *words[1:]]
    if words[0] not in VERBS:
        word = words[0]
        if "=" in word or word.endswith((".yaml", ".yml")) or word in ("-m", "--multirun"):
            raise ConfigError(f"Found '{word}' where a command was expected. Write: mlotool run {word} ...")
        names = ", ".join(VERBS)
        raise ConfigError(f"Unknown command '{word}'; expected one of {names}.{did_you_mean(word, VERBS)}")
    return _call(words[0], words[1:])


def _call(name: str, words: list[str]) -> int:
    code: int = import_module(f"mlotool.cli.verbs.{name}").main(words)
    return code


@contextmanager
def plain_warnings(*, debug: bool) -> Iterator[None]:
    """Print warnings as our own are printed; with --debug, Python's way, which shows the line that warned."""
    previous = warnings.showwarning

    if not debug:
        # Not `formatwarning`, which Lightning replaces when it is imported.
        warnings.showwarning = lambda message, *_, **__: warn(str(message))
    try:
        yield
    finally:
        warnings.showwarning = previous


def _say(text: str, *, debug: bool) -> None:
    if debug:
        sys.excepthook(*sys.exc_info())
    print(f"mlotool: {escape(bounded(text))}", file=sys.stderr)


class _Lasting(io.FileIO):
    """A stream that loses what nobody takes: its reader (`| head`) has gone, or its disk is full.

    Attributes:
        fault: the first error of the system that was more than a reader who has gone.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.fault: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write, or forget."""
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.fault = self.fault or error
            return memoryview(data).nbytes


def open_streams() -> None:
    """Put streams in the place of stdout and stderr that never raise; to be called once, as a process begins.

    One that is closed (`>&-`) leads to nowhere, and its number is taken: the next file would be given it, and what
    libraries print. Characters that the terminal's encoding does not have are written as escapes.
    """
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        raw = _Lasting(number)
        buffer, encoding = io.BufferedWriter(raw), "utf-8" if stream is None else stream.encoding
        is_by_line = raw.isatty() or name == "stderr"
        text = io.TextIOWrapper(buffer, encoding=encoding, errors="backslashreplace", line_buffering=is_by_line)
        setattr(sys, name, text)
