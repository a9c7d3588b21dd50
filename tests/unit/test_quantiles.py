from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relaygr_stream.workload.quantiles import quantile, quantile_name


def test_quantiles_are_observed_values() -> None:
    values = [float(ms) for ms in range(100, 0, -1)]
    assert [quantile(values, q) for q in (0.5, 0.9, 0.99, 0.999)] == [50.0, 90.0, 99.0, None]
    assert quantile([], 0.5) is None
    assert [quantile_name(q) for q in (0.5, 0.99, 0.999)] == ["P50", "P99", "P99.9"]


@given(st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_a_quantile_has_its_share_at_or_below_it_and_no_smaller_value_has(values: list[float], q: float) -> None:
    at = quantile(values, q)
    if at is None:
        assert len(values) < 1 / (1 - q)
        return
    assert at in values
    assert sum(value <= at for value in values) >= q * len(values) - 1e-6
    assert sum(value < at for value in values) < q * len(values)
