"""The contract for machines is that of the types: the files are up to date, and every vector is valid by them."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from relaygr_stream.settings.schema import Kafka
from relaygr_stream.wire.topic_files import load_topics
from tests.unit.test_protocol_vectors import DOCS, VECTORS

SCHEMA = json.loads((DOCS / "messages.schema.json").read_text(encoding="utf-8"))
ASYNCAPI = json.loads((DOCS / "asyncapi.json").read_text(encoding="utf-8"))


def contract() -> Any:
    spec = importlib.util.spec_from_file_location("contract", DOCS.parent / "contract.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_types_say_and_a_change_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = contract()
    assert made.main(["--check"]) == 0
    monkeypatch.setattr(made, "FOLDER", tmp_path)
    assert made.main(["--check"]) == 1
    made.main([])
    assert made.main(["--check"]) == 0
    changed = tmp_path / "asyncapi.json"
    changed.write_text(changed.read_text().replace('"minLength": 1', '"minLength": 2', 1))
    assert made.main(["--check"]) == 1


def as_text(value: Any) -> Any:
    """A vector's meaning as JSON Schema sees it: bytes are text."""
    if isinstance(value, dict):
        return value["bytes"] if set(value) == {"bytes"} else {name: as_text(each) for name, each in value.items()}
    return [as_text(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("vector", VECTORS["messages"], ids=lambda vector: str(vector["about"]))
def test_every_vector_is_valid_and_none_without_its_id_is(vector: dict[str, Any]) -> None:
    schema = {**SCHEMA, "$ref": f"#/$defs/{vector['kind']}"}
    value = as_text(vector["means"])
    jsonschema.Draft202012Validator(schema).validate(value)
    value.pop("request_id" if "request_id" in value else "name")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(schema).validate(value)


def test_both_documents_are_whole() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(ASYNCAPI["channels"]) == {topic.name for topic in load_topics(Kafka(prefix="")).all} | {"routes"}
    for document in (SCHEMA, ASYNCAPI):
        for pointer in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
            found = document
            for name in pointer.split("/"):
                found = found[name]
