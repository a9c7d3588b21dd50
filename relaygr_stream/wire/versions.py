"""What lets processes of two releases talk while a fleet is upgraded: versions, and values that came later.

A message states its version `v` and the least version `min_v` whose reader understands it. Within a version, fields
with a default and values of open enumerations may be added: a reader ignores the former and takes the latter for what
is stated here. Knows nothing of what else is in a message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeVar, get_args

import msgspec
from msgspec.structs import FieldInfo

from relaygr_stream.errors import DecodeError

SCHEMA_VERSION: Final = 1

#: What decoding raises for bytes that are not MessagePack, or have another shape.
NOT_DECODED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
#: A value of an open enumeration is a name; what is longer is no value of a later release.
MAX_NAME: Final = 64
#: Fields of requests and events that later releases will bring (docs/protocol.md, "Reserved names"): no other field may
#: have these names.
RESERVED_FIELDS: Final = frozenset({"features", "history", "delegate"})

_NAME: Final = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]

S = TypeVar("S", bound=msgspec.Struct)


class OpenEnum(NamedTuple):
    """The values of a field that this release knows, and which of them any other is taken for.

    note: the text field that then says which it was, if that one is empty; "": none.
    """

    known: Collection[str]
    otherwise: str
    note: str = ""


class _Versions(msgspec.Struct):
    v: int = SCHEMA_VERSION
    min_v: int = 0


_versions = msgspec.msgpack.Decoder(_Versions)


def check_version(v: int, min_v: int) -> None:
    """Raise DecodeError `unknown_version` unless this reader understands a message of these versions.

    min_v: 0: not stated, so only readers of version v understand it.
    """
    needed = min_v or v
    if v < 1 or needed > SCHEMA_VERSION:
        raise DecodeError(
            "unknown_version",
            f"schema version {v}, for readers of version {needed} or later; this program reads {SCHEMA_VERSION}",
        )


class VersionedDecoder(Generic[S]):
    """Decodes messages of one kind, also those that a later release wrote.

    enums: its open enumerations by field. min_v: what it is where a message does not state it.
    """

    def __init__(self, kind: type[S], enums: Mapping[str, OpenEnum] | None = None, min_v: int = 0) -> None:
        self._kind = kind
        self._enums = {} if enums is None else enums
        self._min_v = min_v
        self._decoder = msgspec.msgpack.Decoder(kind)
        # The same kind with any name in those fields: as typed, and as cheap to refuse, as the kind itself.
        opened = [(f.name, self._opened(f), msgspec.field(**_default(f))) for f in msgspec.structs.fields(kind)]
        self._later = msgspec.msgpack.Decoder(msgspec.defstruct(f"Later{kind.__name__}", opened, kw_only=True))

    def decode(self, data: bytes) -> S:
        """The message. Raises DecodeError where it is for later readers, whatever its shape, and one of NOT_DECODED
        where it is a message of no release."""
        try:
            message = self._decoder.decode(data)
        except NOT_DECODED as error:
            try:
                message = self._kind(**self._known_values(msgspec.structs.asdict(self._later.decode(data))))
            except NOT_DECODED:
                _refuse_other_version(data)
                raise error from None
        self._check(message)
        return message

    def _check(self, stated: Any) -> None:
        if stated.v != SCHEMA_VERSION or stated.min_v:
            check_version(stated.v, stated.min_v or self._min_v)

    def _opened(self, field: FieldInfo) -> Any:
        if field.name not in self._enums:
            return field.type
        return _NAME | None if type(None) in get_args(field.type) else _NAME

    def _known_values(self, values: dict[str, Any]) -> dict[str, Any]:
        for name, enum in self._enums.items():
            value = values[name]
            if value is not None and value not in enum.known:
                values[name] = enum.otherwise
                if enum.note and not values[enum.note]:
                    values[enum.note] = f"{name} {value!r}, which this program does not know"
        return values


def _refuse_other_version(data: bytes) -> None:
    """A message of another version may have any shape; say that rather than which field surprised us."""
    try:
        stated = _versions.decode(data)
    except NOT_DECODED:
        return
    check_version(stated.v, stated.min_v)


def _default(field: FieldInfo) -> dict[str, Any]:
    given = {"default": field.default, "default_factory": field.default_factory}
    return {name: value for name, value in given.items() if value is not msgspec.NODEFAULT}
