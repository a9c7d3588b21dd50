"""Which line of a model author's own code an error or a broken property is about: file, line, text, no variables."""

from __future__ import annotations

import inspect
import linecache
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Longest text of a line that is shown.
MAX_TEXT: Final = 120
_STDLIB: Final = Path(sysconfig.get_path("stdlib")).resolve()
_PACKAGE: Final = Path(__file__).resolve().parents[1]


def own_line(error: BaseException, module: str = "") -> str:
    """The innermost line of the author's own code that led to `error`, or to what it was raised from; "" if there is
    none.

    Own is what is neither of the standard library, of installed packages nor of this one. module: of the model; its
    package counts as own if nothing else does.
    """
    frames = [frame for one in _causes(error) for frame in _frames(one)]
    for is_own in (_is_own, lambda file: _is_of(file, module)):
        for file, line, function in frames:
            if is_own(file):
                return _shown(file, line, f", in {function}" * (not function.startswith("<")))
    return ""


def at_own_line(error: BaseException, module: str = "") -> str:
    """The same as the end of a message: ", at FILE:LINE…", or ""."""
    found = own_line(error, module)
    return f", at {found}" if found else ""


def definition(model: object, method: str) -> str:
    """The line that defines this method of the model, or the model's class if the method is not the author's own; ""
    if neither is."""
    for found in (getattr(type(model), method, None), type(model)):
        try:
            target = inspect.unwrap(found)  # type: ignore[arg-type]  # None and other objects are a TypeError below
            lines, first = inspect.getsourcelines(target)
            file = inspect.getsourcefile(target) or ""
        except (TypeError, OSError):
            continue
        if _is_own(file) or _is_of(file, type(model).__module__):
            offset = next((at for at, text in enumerate(lines) if text.lstrip().startswith(("def ", "class "))), 0)
            return _shown(file, first + offset)
    return ""


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, the first cause first."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.insert(0, current)
        current = current.__cause__
    return chain


def _frames(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """(file, line, function), innermost first; of an error in a file's text, that place before all."""
    if isinstance(error, SyntaxError) and error.filename:
        yield error.filename, error.lineno or 1, "<module>"
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        yield frame.f_code.co_filename, line, frame.f_code.co_name


def _is_own(file: str) -> bool:
    path = Path(file)
    if file.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    path = path.resolve()
    return not (path.is_relative_to(_STDLIB) or path.is_relative_to(_PACKAGE))


def _is_of(file: str, module: str) -> bool:
    """Whether a file is of this module's package."""
    return bool(module) and module.partition(".")[0] in (*Path(file).parts, Path(file).stem)


def _shown(file: str, line: int, where: str = "") -> str:
    path = Path(file).resolve()
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    text = linecache.getline(file, line).strip()
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"
    return f"{path}:{line}{where}" + (f": `{text}`" if text else "")
