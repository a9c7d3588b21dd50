"""Feature columns in the built-in model: the documented sums, the version, the checkpoint and its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from relaygr_stream.errors import ModelError
from relaygr_stream.models.api import Tokens, schema_of
from relaygr_stream.models.features import oov_hash
from relaygr_stream.models.hstu_model import HSTUConfig
from relaygr_stream.models.loading import load_checkpoint, read_config, save_checkpoint
from relaygr_stream.wire.behaviours import Behaviours
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema
from tests.unit.models.broken_families import COLUMNS, Featured
from tests.unit.models.small_models import SHAPE, full_scores, random_features, random_items, random_tokens, small_model

MODEL = Featured(torch.float32)
WEIGHTS = {name: value.numpy() for name, value in MODEL.embedding.state_dict().items()}
SCHEMA = MODEL.features


def category(name: str, values: list[int]) -> Any:
    weight = WEIGHTS[f"features.{name}"]
    rows = [v if 0 <= v < len(weight) else int(oov_hash(np.array([v]))[0] % len(weight)) for v in values]
    return weight[rows].sum(0)


def test_the_sums_are_the_documented_ones() -> None:
    user = SCHEMA.pack({"age": -3, "interests": [0.5, -1.0, 2.0]}, {"user": 1})["user"]
    places = [[3, 1 << 40], [-1, 6]]
    columns = SCHEMA.pack({"dwell_s": [1.5, -2.0], "place": places}, {"behaviour": 2})["behaviour"]
    history = msgspec.structs.replace(Behaviours.from_arrays([4, 5], [1, 2], [1000, 3000]), columns=columns)
    tokens = Tokens.from_behaviours(history, None, SCHEMA, user)
    found = MODEL.embedding.behaviours(tokens, 0).numpy()
    position = WEIGHTS["position"]
    numbers = np.array([0.5, -1.0, 2.0], np.float32) @ WEIGHTS["features.user_interests"]
    expected = [position[0] + category("user_age", [-3]) + numbers]
    for row, (item, action, bucket, dwell) in enumerate(((4, 1, 0, 1.5), (5, 2, 11, -2.0))):
        plain = WEIGHTS["item"][item] + position[row + 1] + WEIGHTS["action"][action] + WEIGHTS["gap"][bucket]
        own = dwell * WEIGHTS["features.behaviour_dwell_s"][0] + category("behaviour_place", places[row])
        expected.append(plain + own)
    assert np.allclose(found, expected, atol=1e-5)
    again = MODEL.embedding.rankings([(tokens.slice(1, 3), 1, np.array([7]))], [SCHEMA.values("candidate", CANDIDATE)])
    assert np.allclose(again[:2].numpy(), expected[1:], atol=1e-5)  # in a suffix, as in the prefix
    own = (
        2.5 * WEIGHTS["features.candidate_price"][0]
        + category("candidate_shop", [12])
        + np.array([0.25, -1.0], np.float32) @ WEIGHTS["features.cross_affinity"]
    )
    assert np.allclose(again[2].numpy(), WEIGHTS["item"][7] + position[3] + WEIGHTS["candidate"] + own, atol=1e-5)


CANDIDATE = SCHEMA.pack({"price": [2.5], "shop": [12], "affinity": [[0.25, -1.0]]}, {"candidate": 1})["candidate"]


def test_the_version_ends_with_the_schemas_digest_and_is_another_without_it() -> None:
    assert schema_of(MODEL) == FeatureSchema(COLUMNS)
    assert MODEL.version.endswith(f"-float32-{SCHEMA.digest}")
    assert Featured(torch.float32, features=COLUMNS[:3]).version != MODEL.version
    assert small_model().version.endswith("-float32")
    assert "features" not in small_model().config.fields()


def test_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    save_checkpoint(MODEL, tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert (loaded.version, loaded.features) == (MODEL.version, SCHEMA)
    assert FeatureSchema.read(tmp_path / "config.json") == SCHEMA  # as a client reads it
    numbers = np.random.default_rng(0)
    history, items = random_tokens(numbers, 9, SCHEMA), random_items(numbers, 4)
    features = random_features(numbers, "candidate", 4, SCHEMA)
    assert torch.equal(full_scores(loaded, history, items, features), full_scores(MODEL, history, items, features))


@pytest.mark.parametrize(
    ("column", "error"),
    [
        ({"name": "age", "of": "user", "dtype": "int32"}, "'age' needs `rows` of at least 1"),
        ({"name": "price", "of": "user", "dtype": "float32", "rows": 3}, "'price' needs no `rows`"),
        ({"name": "a.b", "of": "user", "dtype": "int32", "rows": 1}, "'a.b' has a dot"),
        ({"name": "a", "of": "session", "dtype": "int32", "rows": 1}, "session"),
        ({"name": "a", "of": "user", "dtype": "int8", "rows": 1}, "int8"),
    ],
)
def test_a_checkpoints_column_that_means_nothing_is_named(column: Any, error: str, tmp_path: Path) -> None:
    fields = {**HSTUConfig(**SHAPE).fields(), "architecture": "hstu", "format": 1, "features": [column]}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(fields))
    with pytest.raises(ModelError, match=f"config.json: .*{error}"):
        read_config(tmp_path)


def test_a_name_twice_is_refused() -> None:
    twice = [FeatureColumn(name="a", of=of, dtype="int32", rows=1) for of in ("user", "cross")]
    with pytest.raises(ValueError, match="'a' stands there twice"):
        HSTUConfig(**SHAPE, features=tuple(twice))
