"""One value of a setting: from text, or from TOML, to its type and within its bounds."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any, Final

import msgspec

from relaygr_stream.errors import ConfigError
from relaygr_stream.settings.inputs import MARK
from relaygr_stream.settings.section import SECRET_SHOWN, Field, Value

_UNITS: Final = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]iB|B)?\s*$", re.IGNORECASE)


def checked(field: Field, raw: Any, source: str) -> Value:
    """The value of a setting. raw: text of the environment or of a flag, or a value of TOML. Raises ConfigError."""
    key = field.key
    _refuse_invisible(field, raw, source)
    value = raw
    if isinstance(raw, str) and field.is_bytes:
        value = _parse_size(key, raw, source)
    elif isinstance(raw, str) and field.is_list:  # of the environment, of a flag; and as TOML files had it
        value = [part.strip() for part in raw.split(",")] if raw.strip() else []
    try:
        # Text from the environment or a flag may represent a number or a boolean; a TOML value already has its type.
        value = msgspec.convert(value, field.kind, strict=not isinstance(raw, str))
    except msgspec.ValidationError as error:
        # A value with "@" may be a URL with a password.
        shown = SECRET_SHOWN if field.is_secret or "@" in str(raw) else repr(raw)
        raise ConfigError(f"{source}: `{key}` = {shown}: {error}; its meaning: {field.description}") from error
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


def _parse_size(key: str, raw: str, source: str) -> int:
    match = _SIZE.match(raw)
    if match is None:
        raise ConfigError(f"{source}: `{key}` = {raw!r}: write a number of bytes, or one with KiB, MiB, GiB or TiB")
    size = float(match[1]) * _UNITS[(match[2] or "").lower()]
    if not math.isfinite(size):
        raise ConfigError(f"{source}: `{key}`: a number of {len(raw)} digits is no size")
    return int(size)
