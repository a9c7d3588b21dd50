"""docs/reference/model.md: every public field and method that the author of a model meets, with the code's types."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import relaygr_stream
from relaygr_stream.models import api

ROOT = Path(__file__).parents[2]
CLASSES = (
    "RankingModel", "SteppedModel", "WarmedModel", "Tokens", "ScoreInput", "KVLayout", "KVRegion", "FeatureColumn",
    "FeatureSchema", "DecoderModel",
)  # fmt: skip


def generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = generate()
PAGE: str = GENERATE.on_page_markdown((ROOT / "docs" / "reference" / "model.md").read_text(encoding="utf-8"))


def section(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_the_page_has_these_sections() -> None:
    assert tuple(re.findall(r"^## (.+)$", PAGE, re.M)) == (*CLASSES, "digest", "version_of", "takes_suffix")
    assert "how-to/model.md" in PAGE


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_has_the_type_that_the_code_states(name: str) -> None:
    one = getattr(relaygr_stream, name)
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.+)` \|$", section(name), re.M))
    assert all(
        str(inspect.get_annotations(one)[field]).startswith((kind, f"Annotated[{kind},"))
        for field, kind in rows.items()
    )
    if dataclasses.is_dataclass(one):
        assert [field.name for field in dataclasses.fields(one)] == list(rows)
    elif issubclass(one, msgspec.Struct):
        assert [field.name for field in msgspec.structs.fields(one)] == list(rows)
    elif name in ("RankingModel", "KVRegion", "FeatureSchema"):
        assert len(rows) >= 4
    if name == "KVRegion":
        assert sorted(rows) == sorted(one.__slots__)
    if name == "FeatureSchema":
        assert set(rows) == {field for field in vars(one([])) if not field.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_every_method_is_there(name: str) -> None:
    one = getattr(relaygr_stream, name)
    public = {
        method for method, value in vars(one).items()
        if not method.startswith("_") and (callable(value) or isinstance(value, property | classmethod))
        and getattr(value, "__doc__", None)
    }  # fmt: skip
    named = set(re.findall(r"^- `(\w+)[(:]", section(name), re.M))
    assert public - named <= GENERATE.NOT_FOR_MODELS
    assert named <= set(vars(one))


def test_what_is_for_the_package_alone_exists() -> None:
    members = {member for name in CLASSES for member in vars(getattr(relaygr_stream, name))}
    assert members >= GENERATE.NOT_FOR_MODELS


def test_functions_have_their_signatures() -> None:
    assert "`takes_suffix(model: RankingModel) -> bool`" in section("takes_suffix")
    assert "features: FeatureSchema = NO_FEATURES) -> str`" in section("version_of")
    assert section("digest").count(inspect.cleandoc(api.digest.__doc__ or "-")) == 1


def test_tokens_say_that_features_are_more_rows() -> None:
    assert "int64 array (3 + words, n)" in section("Tokens")
    assert "FeatureSchema.words" in section("Tokens")
