"""Regions as bytes in DRAM: exact ones come back bit for bit, int8 ones within half a step, once and for all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.cache import storage
from relaygr_stream.cache.storage import STEPS, Exact, Int8, Storage, make_storage
from relaygr_stream.models.kv import KVLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layouts(dtype: torch.dtype) -> st.SearchStrategy[KVLayout]:
    small, state = st.integers(1, 3), st.integers(0, 7)
    per_token = st.builds(
        KVLayout, small, small, st.integers(1, 9), st.integers(1, 9), st.just(dtype), state, st.booleans()
    )
    one_kind = st.builds(
        lambda width, keys: KVLayout(2, 2, width * keys, width * (1 - keys), dtype), small, st.integers(0, 1)
    )
    return per_token | one_kind | st.builds(KVLayout.of_state, st.integers(1, 9), st.just(dtype))


def round_trip(form: Storage, region: torch.Tensor, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored bytes and what comes back."""
    stored = torch.full((form.nbytes(capacity),), 77, dtype=torch.uint8)
    form.spill(stored, region)
    back = torch.full_like(region, 5.0)
    form.reload(back, stored)
    return stored, back


def rows(layout: KVLayout, region: torch.Tensor) -> list[torch.Tensor]:
    """K or V of one token and head each, in the region's order."""
    capacity = (region.numel() - layout.state) // max(1, layout.elements_per_token)
    found, start = [], 0
    for width in [width for width in (layout.dqk, layout.dv) if width] * layout.layers:
        size = layout.heads * capacity * width
        found += list(region[start : start + size].view(-1, width))
        start += size
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 1000), scale=st.integers(-20, 12))
def test_int8_is_off_by_half_a_step_at_most_and_rounds_only_once(
    dtype: torch.dtype, data: st.DataObject, seed: int, scale: int
) -> None:
    layout, capacity = data.draw(layouts(dtype)), data.draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(seed)
    region = (torch.randn(layout.elements(capacity), generator=generator) * 2.0**scale).to(dtype)
    stored, back = round_trip(Int8(layout), region, capacity)
    whole = capacity * layout.kv_per_token
    # Times and a state are not rounded.
    assert torch.equal(back[whole:].view(torch.uint8), region[whole:].view(torch.uint8))
    resolution = torch.finfo(dtype).eps
    for before, after in zip(rows(layout, region), rows(layout, back), strict=True):
        top = float(before.float().abs().max())
        # Half a step; the scale's own rounding; and that of the region's type, subnormal ones included.
        allowed = top * (0.5 / STEPS + 2**-15 + resolution) + float(torch.finfo(dtype).smallest_normal) * resolution
        assert float((before.float() - after.float()).abs().max()) <= allowed
    again, twice = round_trip(Int8(layout), back, capacity)
    assert torch.equal(again, stored) or dtype is torch.float16  # whose subnormal values have steps of their own
    assert torch.equal(twice, back)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20)
@given(data=st.data())
def test_exact_comes_back_bit_for_bit(dtype: torch.dtype, data: st.DataObject) -> None:
    layout, capacity = data.draw(layouts(dtype)), data.draw(st.integers(1, 5))
    size = layout.elements(capacity)
    region = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)  # NaN of all kinds included
    stored, back = round_trip(Exact(layout), region, capacity)
    assert stored.numel() == layout.nbytes(capacity)
    assert torch.equal(back.view(torch.uint8), region.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 3.76), (torch.bfloat16, 1.88)])
def test_int8_takes_a_byte_an_element_and_four_a_row(dtype: torch.dtype, times: float) -> None:
    layout = KVLayout(layers=8, heads=4, dqk=64, dv=64, dtype=dtype)
    assert Int8(layout).nbytes(64) == 64 * 8 * 4 * 2 * (64 + 4)
    assert layout.nbytes(64) / Int8(layout).nbytes(64) == pytest.approx(times, abs=0.01)


def test_a_tokens_bytes_do_not_depend_on_its_neighbours() -> None:
    """So that what lies beyond an entry's length, whatever it is, does no harm."""
    layout = KVLayout(layers=2, heads=2, dqk=4, dv=8, dtype=torch.float32)
    clean = torch.randn(6 * layout.elements_per_token)
    dirty = clean.clone()
    for number, row in enumerate(rows(layout, dirty)):  # the last of six tokens of each head
        if number % 6 == 5:
            row.copy_(torch.tensor([float("nan"), float("inf"), 3e38, -1e-40] * (len(row) // 4)))
    back, untouched = (round_trip(Int8(layout), region, 6)[1] for region in (dirty, clean))
    for number, (one, other) in enumerate(zip(rows(layout, back), rows(layout, untouched), strict=True)):
        assert torch.equal(one, other) == (number % 6 != 5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_does_not_come_back_as_a_number(bad: float, dtype: torch.dtype) -> None:
    layout = KVLayout(layers=1, heads=1, dqk=4, dv=4, dtype=dtype)
    region = torch.ones(2 * layout.elements_per_token, dtype=dtype)
    region[1] = bad
    back = round_trip(Int8(layout), region, 2)[1]
    assert not back[1].isfinite()
    assert back[4:].isfinite().all()


def test_zeros_stay_zeros_and_the_largest_stay_finite() -> None:
    layout = KVLayout(layers=1, heads=1, dqk=4, dv=4, dtype=torch.float32)
    region = torch.tensor([0.0] * 4 + [torch.finfo(torch.float32).max] * 4)
    back = round_trip(Int8(layout), region, 1)[1]
    assert torch.equal(back[:4], region[:4])
    assert torch.allclose(back, region, rtol=2**-15)


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    layout = KVLayout(layers=2, heads=3, dqk=5, dv=7, dtype=torch.float32)
    region = torch.randn(4 * layout.elements_per_token)
    whole = round_trip(Int8(layout), region, 4)
    monkeypatch.setattr(storage, "CPU_PIECE", piece)
    pieces = round_trip(Int8(layout), region, 4)
    assert torch.equal(whole[0], pieces[0])
    assert torch.equal(whole[1], pieces[1])


def test_the_setting_names_the_form() -> None:
    layout = KVLayout(layers=1, heads=1, dqk=4, dv=4, dtype=torch.float32)
    assert not make_storage("exact", layout).approximate
    assert make_storage("int8", layout).approximate
