"""Errors in code that is not mlotool's: whose they are, where they came from, and what that code was given.

Where mlotool calls such code it notes the call on an exception that passes (`note`), and lets it go on. Further up,
once around a whole run, `user_code` turns it into one message. What has neither a note nor a frame of the user's is a
bug of mlotool's, and stays as it is.

Code of the user's may raise what is no `Exception`: SystemExit, asyncio.CancelledError, GeneratorExit. It is told all
the same; only KeyboardInterrupt, which is a Ctrl-C, passes.
"""

import functools
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlotool.core.errors import MlotoolError, RunError
from mlotool.core.messages import described

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "size calculation overflowed")
MORE_MEMORY = (
    "Expected enough memory: lower the batch sizes, data.sizes or the size of the model, or end other programs."
)
NO_EXIT = "Expected that the code does not end the program; nothing has finished. Raise an error there that says why."


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception means that there is no memory left, on the CPU or on a GPU."""
    # torch raises a RuntimeError with its allocator's words.
    return isinstance(error, MemoryError) or any(value in str(error) for value in _OUT_OF_MEMORY)


def is_refusal(error: BaseException) -> bool:
    """Say whether a constructor refuses its values by an error: the assertions of torch's are some as well.

    Example:
        >>> is_refusal(ValueError("in_channels must be divisible by groups")), is_refusal(TypeError("gruops"))
        (True, False)
    """
    is_mistake = isinstance(error, MlotoolError | NotImplementedError | RecursionError | UnicodeError)
    is_kind = isinstance(error, ValueError | RuntimeError | AssertionError)
    return is_kind and not is_mistake and not is_out_of_memory(error)


_HOME = str(Path(__file__).parents[1])
_PYTHON = {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib")}
_LIBRARIES = ("/site-packages/", "/dist-packages/", *_PYTHON)
_NOTE = "_mlotool_call"
_packages: set[str] = set()


class UserCodeError(RunError):
    """Code of the user's has failed in a run; the exception that it raised is the cause (`__cause__`)."""


@dataclass(frozen=True)
class Call:
    """A call of code that a recipe names.

    Args:
        key: where the recipe names it.
        what: a callable, which is told with its place, or words.
        given: what it was called with, by name; modules as they are.
        expected: what should have happened.
        advice: what to do.
        is_foreign: whether the code is none of mlotool's whatever the traceback says.
    """

    key: str
    what: Any
    given: Mapping[str, Any] = field(default_factory=dict)
    expected: str = ""
    advice: str = ""
    is_foreign: bool = True


def note(error: BaseException, call: Callable[[], Call]) -> None:
    """Keep with an exception which call it came out of; the innermost one stays.

    A traceback shows it too: a Python script has no command line that would make one message of it.
    """
    if hasattr(error, _NOTE):
        return
    # A class of the user's may take no attributes.
    with suppress(Exception):
        setattr(error, _NOTE, call)
        # Those of mlotool say it themselves; some are raised and caught in each evaluation.
        if not type(error).__module__.startswith("mlotool."):
            error.add_note(f"mlotool: {_explained(error, call(), None)}")


@contextmanager
def noted(call: Callable[[], Call]) -> Iterator[None]:
    """Note a call on an exception that passes."""
    try:
        yield
    except BaseException as error:
        note(error, call)
        raise


@contextmanager
def user_code(raises: type[MlotoolError] = UserCodeError, prefix: Callable[[], str] = str) -> Iterator[None]:
    """Turn what code of the user's raises into one message; the exception stays as its cause.

    Args:
        raises: the class of the error that is raised.
        prefix: what to say before it, such as the tick.
    """
    try:
        yield
    except UserCodeError as error:
        # Of a place that could not know whether a run has begun.
        raise raises(f"{prefix()}{error}") from error.__cause__
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        text = explained(error)
        if text is None:
            raise
        raise raises(f"{prefix()}{text}") from error


def explained(error: BaseException) -> str | None:
    """Return what a user has to know of an exception; None where it is no fault of the user's code."""
    called = getattr(error, _NOTE, None)
    if isinstance(error, MlotoolError):
        # One that says everything itself; a `WrongResultError` does not know whose result it is.
        return _explained(error, called(), None) if isinstance(error, WrongResultError) and called else None
    frame = user_frame(error)
    call = None if called is None else called()
    if call is None or not (call.is_foreign or frame):
        if frame is None:
            return None
        advice = MORE_MEMORY if is_out_of_memory(error) else "Expected code that runs. Correct it."
        return f"{_at(frame)}: {_said(error)}. {NO_EXIT if isinstance(error, SystemExit) else advice}"
    return _explained(error, call, frame)


class WrongResultError(MlotoolError):
    """A function has returned something else than it should.

    Args:
        found: what it returned, after "returned".
        expected: after "expected".
        advice: a sentence.
    """

    def __init__(self, found: str, expected: str, advice: str) -> None:
        super().__init__(f"A function returned {found}; expected {expected}. {advice}")
        self.found, self.expected, self.advice = found, expected, advice

    def __str__(self) -> str:
        called = getattr(self, _NOTE, None)
        return super().__str__() if called is None else _explained(self, called(), None)


def user_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the deepest frame of an exception's traceback that is in code of the user's."""
    walk = [(frame.f_code, line, frame.f_globals) for frame, line in traceback.walk_tb(error.__traceback__)]
    for code, line, scope in reversed(walk):
        if is_users(code.co_filename, scope.get("__name__", "")):
            return traceback.FrameSummary(code.co_filename, line, code.co_name, lookup_line=False)
    return None


def passed_through(error: BaseException, folder: str) -> bool:
    """Say whether an exception's traceback leads through a folder of a library, such as `/torch/optim/`."""
    return any(folder in frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))


def is_users(file: str, module: str = "") -> bool:
    """Say whether code is the user's: of a trusted package, or outside of mlotool, Python and what is installed."""
    package = module.partition(".")[0]
    if package in _packages:
        return True
    if package == "mlotool" or file.startswith(_HOME) or package in sys.stdlib_module_names:
        return False
    # What Cython has compiled names its source by a path within its library.
    if file.endswith((".pyx", ".pxd")):
        return False
    return not file.startswith("<frozen") and not any(value in file for value in _LIBRARIES)


def add_user_package(package: str) -> None:
    """Take a package for the user's, wherever it is installed."""
    _packages.add(package)


def is_of_user(*targets: Any) -> bool:
    """Say whether a function, a class or an object's class, out of several, is the user's."""
    return any(is_users(_file_of(value), value.__module__ or "") for value in map(_definition, targets))


def is_ours(*targets: Any) -> bool:
    """Say whether functions, classes and objects' classes are all mlotool's or torch's."""
    homes = {(value.__module__ or "").partition(".")[0] for value in map(_definition, targets)}
    return homes <= {"mlotool", "torch"}


def named(target: Any) -> str:
    """Return the name of a function, a class or an object's class; of the user's with its file and line."""
    target = _definition(target)
    name = f"{target.__module__}.{target.__qualname__}"
    file = _file_of(target)
    try:
        line = inspect.getsourcelines(target)[1]
    except (OSError, TypeError):
        return name
    return f"{name} ({nearby(file)}, line {line})" if is_users(file, target.__module__) else name


def _definition(target: Any) -> Any:
    """Return the function or class behind a partial, a decorator such as torch.no_grad, or an object."""
    while isinstance(target, functools.partial):
        target = target.func
    return inspect.unwrap(target) if inspect.isroutine(target) or inspect.isclass(target) else type(target)


@functools.lru_cache(maxsize=10_000)
def _file_of(definition: Any) -> str:
    try:
        return inspect.getsourcefile(definition) or ""
    except (OSError, TypeError):
        return ""


def nearby(file: str) -> str:
    """Return a path from the working directory, where it lies below."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return file


def _explained(error: BaseException, call: Call, frame: traceback.FrameSummary | None) -> str:
    what = call.what if isinstance(call.what, str) else named(call.what)
    given = f" It was given {_given(call.given)}." if call.given else ""
    if isinstance(error, WrongResultError):
        return f"{call.key}: {what} returned {error.found}; expected {error.expected}.{given} {error.advice}"
    where = "" if frame is None else f" at {_at(frame)}"
    expected = f" Expected {call.expected}." if call.expected else ""
    advice = call.advice or "Correct it."
    if is_out_of_memory(error) or isinstance(error, SystemExit):
        advice = NO_EXIT if isinstance(error, SystemExit) else MORE_MEMORY
    return f"{call.key}: {what} failed{where}: {_said(error)}.{given}{expected} {advice}"


def _given(values: Mapping[str, Any]) -> str:
    texts = {name: named(value) if callable(value) else described(value) for name, value in values.items()}
    return ", ".join(f"{name} = {text}" for name, text in texts.items())


def _at(frame: traceback.FrameSummary) -> str:
    return f"{nearby(frame.filename)}, line {frame.lineno}, in {frame.name}"


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}{'...' if len(text) > 500 else ''}".rstrip(": .")
