"""Compatibility of messages between releases, while a fleet is upgraded.

A message states its version `v` and the lowest version `min_v` whose reader understands it. Within a version, a release
may add fields with a default, which older readers ignore, and values of open enumerations, which older readers replace
by a known value (`OpenEnum`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar, Union, get_args

import msgspec
from msgspec.structs import FieldInfo

from relaygr_stream.errors import DecodeError

#: The version of messages that every release reads: what is written unless a message needs later readers.
SCHEMA_VERSION: Final = 1
#: The latest version that this program reads: 2 knows references to histories (wire/history.py), 3 names of users that
#: are keyed with the fleet's secret (wire/erase.py), 4 item ids of 8 bytes (wire/behaviours.py).
READ_VERSION: Final = 4

#: Errors of decoding bytes that are not MessagePack, or have another shape.
NOT_DECODED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
#: Characters kept of a decoding error: the decoder quotes the unexpected value in full. This keeps place and beginning.
MAX_DETAIL: Final = 500
#: Longest value of an open enumeration; a longer text is refused.
MAX_NAME: Final = 64
#: Names reserved for fields of requests and events in later releases (docs/reference/protocol.md, "Reserved names").
#: A pre-infer signal has a `delegate` already.
RESERVED_FIELDS: Final = frozenset({"delegate"})

_NAME: Final = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]

S = TypeVar("S", bound=msgspec.Struct)


class OpenEnum(NamedTuple):
    """The known values of a field, and what replaces an unknown text.

    note: the text field that then names the unknown value, if that field is empty; "": none.
    """

    known: Collection[str]
    otherwise: str | msgspec.UnsetType
    note: str = ""


class _Versions(msgspec.Struct):
    v: int = SCHEMA_VERSION
    min_v: int = 0


_versions = msgspec.msgpack.Decoder(_Versions)


def check_version(v: int, min_v: int) -> None:
    """Raise DecodeError `unknown_version` unless this reader understands a message of these versions.

    min_v: 0 means not stated: only readers of version v understand the message.
    """
    needed = min_v or v
    if v < 1 or needed > READ_VERSION:
        raise DecodeError(
            "unknown_version",
            f"schema version {v}, for readers of version {needed} or later; this program reads {READ_VERSION}",
        )


class VersionedDecoder(Generic[S]):
    """Decodes messages of one kind, including those of later releases.

    enums: the open enumerations by field. min_v: of messages that do not state it.
    """

    def __init__(self, kind: type[S], enums: Mapping[str, OpenEnum] | None = None, min_v: int = 0) -> None:
        self._kind = kind
        self._enums = {} if enums is None else enums
        self._min_v = min_v
        self._decoder = msgspec.msgpack.Decoder(kind)
        # The same kind, with any short text in those fields: still typed, so hostile input stays cheap to refuse.
        opened = [(f.name, self._opened(f), msgspec.field(**_default(f))) for f in msgspec.structs.fields(kind)]
        self._later = msgspec.msgpack.Decoder(msgspec.defstruct(f"Later{kind.__name__}", opened, kw_only=True))

    def decode(self, data: bytes) -> S:
        """The message. Raises DecodeError: `unknown_version` if it is for later readers, `malformed`."""
        try:
            message = self._decoder.decode(data)
        except NOT_DECODED as error:
            try:
                message = self._kind(**self._known_values(msgspec.structs.asdict(self._later.decode(data))))
            except NOT_DECODED:
                _refuse_other_version(data)
                raise DecodeError("malformed", str(error)[:MAX_DETAIL]) from error
        stated: Any = message
        if stated.v != SCHEMA_VERSION or stated.min_v:
            check_version(stated.v, stated.min_v or self._min_v)
        return message

    def _opened(self, field: FieldInfo) -> Any:
        if field.name not in self._enums:
            return field.type
        others = [each for each in get_args(field.type) if isinstance(each, type) and not issubclass(each, str)]
        return Union[(_NAME, *others)]

    def _known_values(self, values: dict[str, Any]) -> dict[str, Any]:
        for name, enum in self._enums.items():
            value = values[name]
            if isinstance(value, str) and value not in enum.known:
                values[name] = enum.otherwise
                if enum.note and not values[enum.note]:
                    values[enum.note] = f"{name} {value!r}, which this program does not know"
        return values


def _refuse_other_version(data: bytes) -> None:
    """Raise DecodeError `unknown_version` for a malformed message of another version: the version is the cause."""
    try:
        stated = _versions.decode(data)
    except NOT_DECODED:
        return
    check_version(stated.v, stated.min_v)


def _default(field: FieldInfo) -> dict[str, Any]:
    given = {"default": field.default, "default_factory": field.default_factory}
    return {name: value for name, value in given.items() if value is not msgspec.NODEFAULT}
