"""What settings are made of: sections that hide secrets, the types of values, and the description of each setting."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Annotated, Any, Final, get_type_hints

import msgspec
from msgspec import Meta, Struct, structs
from msgspec import inspect as msgspec_inspect

ENV_PREFIX = "RELAYGR_"

#: Names of settings that no log, error or traceback shows; each also has `secret` in its extra.
SECRETS = frozenset(
    {
        *("secret", "accepted_secret", "answer_secret", "accepted_answer_secret", "hash_key", "tokens"),
        *("password", "sasl_password", "key_password", "tls_key_password"),
    }
)
SECRET_SHOWN = "********"

BYTES = {"unit": "bytes"}  # a setting with this unit also accepts "512MiB", "2GiB", …

#: A text for logs and keys, without control characters and NUL.
LABEL = Meta(max_length=128, pattern=r"\A[^\x00-\x1f\x7f-\x9f]*\Z")
#: Of names in Kafka, files and certificates: shorter ones are told by length, others by what they may consist of.
NAME_SIGNS = r"\A[A-Za-z0-9._-]*\Z"
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=NAME_SIGNS)]
#: A path, or several as in PYTHONPATH: values.py refuses what no file system takes.
FilePath = Annotated[str, Meta(extra={"path": True})]
SharedSecret = Annotated[str, Meta(pattern=r"\A(.{16,})?\Z", extra={"secret": True})]
MAX_PORT: Final = 65_535
Port = Annotated[int, Meta(ge=0, le=MAX_PORT)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Ms = Annotated[float, Meta(gt=0, le=3.6e6)]


def doc(text: str) -> Meta:
    """The meaning of a setting, for its table and help texts.

    A field of a section without it is no setting but a constant, with its derivation beside it. Its value can be given
    to the constructor: tests are quicker with other times, and the laboratory stretches them.
    """
    return Meta(description=text)


class Section(Struct, frozen=True, kw_only=True):
    """A group of settings; its representation hides secrets."""

    def __repr__(self) -> str:
        shown = (
            f"{name}={SECRET_SHOWN if _is_secret(name, value) else repr(value)}"
            for name, value in structs.asdict(self).items()
        )
        return f"{type(self).__name__}({', '.join(shown)})"


def _is_secret(name: str, value: object) -> bool:
    return (name in SECRETS and bool(value)) or (name == "bootstrap" and "@" in str(value))


@dataclass(frozen=True)
class Field:
    """One setting of the schema."""

    key: str  # "section.name"
    kind: Any
    default: Any
    description: str  # "": no setting, but a constant that tests and the laboratory vary
    is_bytes: bool
    is_secret: bool
    is_list: bool  # of text
    is_path: bool
    choices: tuple[str, ...]  # its values, where they are few words

    @property
    def env(self) -> str:
        """The environment variable that sets it."""
        return env_name(self.key)


@dataclass(frozen=True)
class Value:
    """A setting's effective value and its source."""

    field: Field
    value: Any = dataclass_field(repr=False)  # may be a secret
    source: str  # "default", "FILE", "environment RELAYGR_…", "flag --set …"

    @property
    def shown(self) -> str:
        """The value as text; secrets are hidden."""
        if self.field.is_secret and self.value:
            return SECRET_SHOWN
        return msgspec.json.encode(self.value).decode()


def env_name(key: str) -> str:
    """The environment variable of the setting `key`."""
    return ENV_PREFIX + key.replace(".", "_").upper()


def fields_of(settings: type[Struct]) -> dict[str, Field]:
    """Every field that is or was a setting, by its key. settings: a Struct of Sections, and of what is none."""
    sections = {each.name: each.type for each in structs.fields(settings)}
    return {
        key: field
        for name, kind in sections.items()
        if isinstance(kind, type) and issubclass(kind, Section)
        for key, field in section_fields(name, kind).items()
    }


def section_fields(name: str, section: type[Section]) -> dict[str, Field]:
    """The fields of one section, by their keys NAME.FIELD."""
    fields: dict[str, Field] = {}
    hints = get_type_hints(section, include_extras=True)
    for item in structs.fields(section):
        kind = hints[item.name]
        info = msgspec_inspect.type_info(kind)
        description = ""
        extra: dict[str, Any] = {}
        while isinstance(info, msgspec_inspect.Metadata):
            description = (info.extra_json_schema or {}).get("description", description)
            extra = {**extra, **(info.extra or {})}
            info = info.type
        if extra.get("internal"):
            continue
        key = f"{name}.{item.name}"
        fields[key] = Field(
            key=key,
            kind=kind,
            default=item.default,
            description=description,
            is_bytes=extra.get("unit") == "bytes",
            is_secret=bool(extra.get("secret")),
            is_list=isinstance(info, msgspec_inspect.VarTupleType),
            is_path=bool(extra.get("path")),
            choices=tuple(map(str, info.values)) if isinstance(info, msgspec_inspect.LiteralType) else (),
        )
    return fields
