"""One value of a setting: from text, or from TOML, to its type and within its bounds."""

from __future__ import annotations

import math
import os
import re
import unicodedata
from typing import Any, Final

import msgspec

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.inputs import MARK
from relaygr_stream.settings.section import SECRET_SHOWN, Field, Value

_UNITS: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
#: Linux's bounds, in bytes: NAME_MAX of a file, PATH_MAX without its NUL.
MAX_NAME: Final = 255
MAX_PATH: Final = 4095
#: Characters of a value that a message shows whole.
MAX_SHOWN: Final = 160
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B)?\s*$", re.IGNORECASE)


def checked(field: Field, raw: Any, source: str) -> Value:
    """The value of a setting. raw: text of the environment or of a flag, or a value of TOML. Raises ConfigError."""
    key = field.key
    _refuse_invisible(field, raw, source)
    if field.is_path and isinstance(raw, str):
        _refuse_impossible(field, raw, source)
    value = raw
    if isinstance(raw, str) and field.is_bytes:
        value = _parse_size(key, raw, source)
    elif isinstance(raw, str) and field.is_list:  # of the environment, of a flag; and as TOML files had it
        value = [part.strip() for part in raw.split(",")] if raw.strip() else []
    try:
        # Text from the environment or a flag may represent a number or a boolean; a TOML value already has its type.
        value = msgspec.convert(value, field.kind, strict=not isinstance(raw, str))
    except msgspec.ValidationError as error:
        why = f"write one of {', '.join(field.choices)}" if field.choices else error
        raise ConfigError(
            f"{source}: `{key}` = {_shown(field, raw)}: {why}; its meaning: {field.description}"
        ) from error
    return Value(field, value, source)


def _refuse_invisible(field: Field, raw: Any, source: str) -> None:
    """Raise ConfigError for text with a character that nobody sees: a secret or a name with it differs from itself."""
    for text in raw if isinstance(raw, list) else [raw]:
        for sign in text if isinstance(text, str) else "":
            if sign == MARK or (field.is_secret and unicodedata.category(sign) == "Cf"):
                raise ConfigError(
                    f"{source}: `{field.key}` has the invisible character U+{ord(sign):04X}"
                    f"{', a byte order mark' if sign == MARK else ''}: remove it"
                )


def _refuse_impossible(field: Field, raw: str, source: str) -> None:
    """Raise ConfigError for a path that no file system takes."""
    if "\0" in raw:
        raise ConfigError(f"{source}: `{field.key}` has a NUL: remove it")
    for path in raw.split(os.pathsep):
        for what, text, most in (*(("name", part, MAX_NAME) for part in path.split("/")), ("path", path, MAX_PATH)):
            if (length := len(os.fsencode(text))) > most:
                raise ConfigError(
                    f"{source}: `{field.key}` = {_shown(field, raw)}: has a {what} of {length} bytes, at most {most} "
                    f"are possible; shorten it"
                )


def shortened(text: str, characters: int = 0) -> str:
    """For a message. characters: of what the text stands for; 0: of the text."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]}… ({characters or len(text)} characters)"


def _shown(field: Field, raw: object) -> str:
    if field.is_secret or "@" in str(raw):  # it may be a URL with a password
        return SECRET_SHOWN
    return shortened(repr(raw), len(str(raw)))


def _parse_size(key: str, raw: str, source: str) -> int:
    match = _SIZE.match(raw)
    if match is None:
        raise ConfigError(f"{source}: `{key}` = {raw!r}: write a number of bytes, or one with KiB, MiB, GiB or TiB")
    size = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if not math.isfinite(size):
        raise ConfigError(f"{source}: `{key}`: a number of {len(raw)} digits is no size")
    return int(size)
