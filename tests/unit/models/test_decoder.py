"""Decoders with past_key_values, of transformers and of one's own: candidates score as if each alone were appended."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from relaygr_stream import settings
from relaygr_stream.errors import ModelError
from relaygr_stream.models import decoder as module
from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.check.probe import Probe, RequestBounds
from relaygr_stream.models.check.run import check_model, run_properties
from relaygr_stream.models.decoder import DecoderModel
from relaygr_stream.models.loading import load_model
from relaygr_stream.wire.features import FeatureColumn, FeatureSchema
from tests import needs
from tests.unit.models.small_models import prefilled, random_items, random_tokens

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
ITEMS, DIM, HEADS, LAYERS, POSITIONS = 50, 16, 2, 2, 200
BOUNDS = RequestBounds(prefix=120, suffix=16, candidates=20, items=ITEMS, max_stale=9)
SCHEMA = FeatureSchema(
    [
        FeatureColumn(name="age", of="user", dtype="int32"),
        FeatureColumn(name="dwell", of="behaviour", dtype="float32"),
        FeatureColumn(name="price", of="candidate", dtype="float32"),
    ]
)


class OwnDecoder(nn.Module):
    """Of the convention, without transformers: a tuple of hidden states and pairs. Its mask is causal by default."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.positions = nn.Embedding(ITEMS, DIM), nn.Embedding(POSITIONS, DIM)
        self.qkv = nn.ModuleList(nn.Linear(DIM, 3 * DIM) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.dropout = nn.Dropout(0.3)

    def forward(
        self, input_ids: Any, more: Any = 0, past_key_values: Any = None, use_cache: bool = False,
        position_ids: Any = None, attention_mask: Any = None,
    ) -> Any:  # fmt: skip
        count, start = input_ids.shape[1], past_key_values[0][0].shape[2] if past_key_values else 0
        positions = torch.arange(start, start + count)[None] if position_ids is None else position_ids
        x, pairs = self.items(input_ids) + self.positions(positions) + more, []
        if attention_mask is None:
            attention_mask = torch.full((count, start + count), -math.inf, dtype=x.dtype).triu_(start + 1)
        for layer in range(LAYERS):
            q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv[layer](x).split(DIM, dim=2))
            if past_key_values:
                k, v = (torch.cat(both, 2) for both in zip(past_key_values[layer], (k, v), strict=True))
            pairs.append((k, v))
            seen = functional.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
            x = x + self.dropout(self.out[layer](seen.transpose(1, 2).flatten(2)))
        return x, tuple(pairs) if use_cache else None


class Plain(OwnDecoder):
    """Knows neither masks nor positions, as older modules do."""

    def forward(self, input_ids: Any, past_key_values: Any = None, use_cache: bool = False) -> Any:  # type: ignore[override]
        return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)


class Unmasked(OwnDecoder):
    """Takes a mask and does not use it."""

    def forward(self, input_ids: Any, attention_mask: Any = None, **more: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, **more)


class Sliding(OwnDecoder):
    """Keeps the newest seven tokens alone."""

    def forward(self, *inputs: Any, **more: Any) -> Any:
        hidden, pairs = super().forward(*inputs, **more)
        return hidden, tuple((k[:, :, -7:], v[:, :, -7:]) for k, v in pairs)


class NoPast(OwnDecoder):
    """Returns no K and V."""

    def forward(self, *inputs: Any, **more: Any) -> Any:
        return super().forward(*inputs, **{**more, "use_cache": False})


class Reads(nn.Module):
    """What a decoder adds of feature columns: a module, because it has weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.ages, self.numbers = name, nn.Embedding(128, DIM), nn.Linear(1, DIM)

    def forward(self, rows: Any) -> Any:
        if isinstance(rows, ScoreInput):
            return self._inputs(rows.candidates, torch.as_tensor(rows.features[self.name]))
        behaviours = rows.slice(rows.context, len(rows)).features("behaviour", SCHEMA)[self.name]
        inputs = self._inputs(rows.array[0], torch.as_tensor(np.pad(behaviours, ((rows.context, 0), (0, 0)))))
        if rows.context:
            age = torch.as_tensor(rows.slice(0, 1).features("user", SCHEMA)["age"] % 128)
            inputs["more"] = torch.cat((self.ages(age[:, 0]), inputs["more"][1:]))
        return inputs

    def _inputs(self, items: Any, numbers: torch.Tensor) -> dict[str, Any]:
        return {"input_ids": items % ITEMS, "more": self.numbers(numbers.to(self.numbers.weight))}


def own(dtype: torch.dtype = torch.float32, kind: Callable[[], nn.Module] = OwnDecoder, **changes: Any) -> DecoderModel:
    torch.manual_seed(3)
    given: dict[str, Any] = {
        "tasks": ("click", "like"),
        "config": {"heads": HEADS},
        "behaviours": lambda tokens: {"input_ids": tokens.array[0] % ITEMS},
        "candidates": lambda one: {"input_ids": one.candidates % ITEMS},
    }
    return DecoderModel(kind(), nn.Linear(DIM, 2), device=CPU, dtype=dtype, **(given | changes))


def transformers() -> Any:
    return needs.module("transformers")


def gpt2() -> Any:
    kind = transformers()
    shape = {"n_embd": DIM, "n_layer": LAYERS, "n_head": HEADS}
    return kind.GPT2Model(
        kind.GPT2Config(vocab_size=ITEMS, n_positions=POSITIONS, bos_token_id=None, eos_token_id=None, **shape)
    )


def llama() -> Any:
    """Rotary positions, and fewer heads of K and V than of queries."""
    kind = transformers()
    shape = {"hidden_size": DIM, "intermediate_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config = kind.LlamaConfig(vocab_size=ITEMS, max_position_embeddings=POSITIONS, num_key_value_heads=2, **shape)
    return kind.LlamaModel(config)


def hugging(kind: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **changes: Any) -> DecoderModel:
    return own(dtype, kind, cache=transformers().DynamicCache, **changes)


def failed(make: Callable[[torch.dtype], DecoderModel]) -> list[str]:
    probe = Probe(make, CPU, torch.float32, replace(BOUNDS, prefix=12), seed=1)
    return [finding.about.name for finding in run_properties(probe) if finding.verdict == "FAILED"]


MODELS: dict[str, Callable[..., DecoderModel]] = {
    "own": own,
    "own in a batch": lambda dtype=torch.float32: own(dtype, masked=False),
    "plain": lambda dtype=torch.float32: own(dtype, Plain, masked=False),
    "gpt2": lambda dtype=torch.float32: hugging(gpt2, dtype),
    "gpt2 in a batch": lambda dtype=torch.float32: hugging(gpt2, dtype, masked=False),
    "llama": lambda dtype=torch.float32: hugging(llama, dtype),
    "llama in a batch": lambda dtype=torch.float32: hugging(llama, dtype, masked=False),
}


#: transformers takes eight seconds of a core to import.
NAMES = [
    pytest.param(name, marks=() if name in ("own", "own in a batch", "plain") else pytest.mark.stack) for name in MODELS
]


@pytest.mark.parametrize("name", NAMES)
def test_the_check_passes(name: str) -> None:
    said: list[str] = []
    assert check_model(Probe(MODELS[name], CPU, torch.float32, BOUNDS, seed=1), said.append), "\n".join(said)


@pytest.mark.stack
@pytest.mark.parametrize("name", MODELS)
def test_the_check_passes_in_bfloat16(name: str) -> None:
    said: list[str] = []
    assert check_model(Probe(MODELS[name], CPU, torch.bfloat16, BOUNDS, seed=1), said.append), "\n".join(said)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("prefix", "suffix"), [(0, 0), (0, 3), (1, 0), (20, 0), (20, 5)])
def test_a_candidate_scores_as_the_last_token_of_the_whole_sequence(
    name: str, prefix: int, suffix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MASKED_ROWS", 4)
    model = MODELS[name]()
    monkeypatch.setattr(module, "BATCH_BYTES", 4 * model.layout.nbytes(prefix + suffix + 1))
    random = np.random.default_rng(1)
    history, candidates = random_tokens(random, prefix + suffix), random_items(random, 11)
    region = prefilled(model, history.slice(0, prefix), slack=3, chunks=(prefix // 2,) if prefix > 1 else ())
    (scores,) = model.score([ScoreInput(region, history.slice(prefix, prefix + suffix), candidates)])
    for item, found in zip(candidates, scores, strict=True):
        ids = torch.as_tensor(np.append(history.array[0], item) % ITEMS)
        with torch.no_grad():
            whole = model.decoder(input_ids=ids[None])[0]
            expected = model.head(whole[0, -1].float())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_columns_reach_the_decoder() -> None:
    def make(dtype: torch.dtype) -> DecoderModel:
        torch.manual_seed(4)
        readers = {"behaviours": Reads("dwell"), "candidates": Reads("price")}
        return own(dtype, features=SCHEMA, **readers)

    said: list[str] = []
    assert check_model(Probe(make, CPU, torch.float32, BOUNDS, seed=1), said.append), "\n".join(said)


def test_a_mask_that_the_check_alone_finds_out() -> None:
    """At the start it is tried with two tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecoderModel, "_try_mask", lambda self: None)
        assert "candidates apart" in failed(lambda dtype: own(dtype, Unmasked))
    assert failed(lambda dtype: own(dtype, Unmasked, masked=False)) == []


def test_a_prefix_that_the_decoder_shortens_is_refused() -> None:
    model = own(kind=Sliding, masked=False)
    with pytest.raises(ModelError, match=r"returned K and V of \[7\] tokens; a prefix must stay whole: 20"):
        prefilled(model, random_tokens(np.random.default_rng(1), 20), slack=0)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (NoPast, {}, "NoPast(input_ids, past_key_values, use_cache) must return hidden states, and as past_key_values"),
        (nn.Identity, {}, "Identity(input_ids, past_key_values, use_cache) must return hidden states"),
        (OwnDecoder, {"behaviours": lambda tokens: {"input_ids": np.zeros(7, int)}}, "`behaviours` of 1 rows returned"),
        (
            Unmasked,
            {},
            "Unmasked takes no `attention_mask` (1, 1, n, tokens + n): give masked=False: a candidate's hidden",
        ),
        (Plain, {}, "Plain takes no `attention_mask` (1, 1, n, tokens + n): give masked=False: TypeError"),
        (OwnDecoder, {"behaviours": lambda tokens: {"ids": tokens.array[0]}}, "unexpected keyword argument 'ids'"),
    ],
)
def test_a_decoder_that_is_called_otherwise_is_refused(kind: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as refused:
        own(kind=kind, **changes)
    assert words in str(refused.value)


def test_the_version_is_that_of_weights_configuration_columns_and_type() -> None:
    def other() -> nn.Module:
        decoder = OwnDecoder()
        nn.init.zeros_(decoder.items.weight)
        return decoder

    readers: dict[str, Any] = {"features": SCHEMA, "behaviours": Reads("dwell"), "candidates": Reads("price")}
    versions = [
        own().version,
        own(kind=other).version,
        own(config={"heads": 4}).version,
        own(torch.bfloat16).version,
        own(**readers).version,
    ]
    assert len(set(versions)) == len(versions)
    assert own().version == versions[0]
    assert versions[-1].endswith(SCHEMA.digest)


@pytest.mark.stack
def test_its_layout_is_what_the_decoder_returns() -> None:
    layout = hugging(llama, torch.bfloat16).layout
    assert (layout.layers, layout.heads, layout.dqk, layout.dv, layout.dtype) == (LAYERS, 2, 4, 4, torch.bfloat16)


@pytest.mark.stack
def test_the_example_is_a_factory() -> None:
    transformers()
    shape = settings.Model(path=str(ROOT), factory="examples.models.gpt2:make")
    made = load_model(shape, settings.Relay(), device=CPU, dtype=torch.float32)
    assert made.tasks == ("click",)
    assert made.note == "random weights, seed 7"
    again = load_model(shape, settings.Relay(), device=CPU, dtype=torch.float32)
    assert again.version == made.version
    region = prefilled(made, random_tokens(np.random.default_rng(1), 9), slack=1)
    assert region.length == 9
