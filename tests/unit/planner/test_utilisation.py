"""How busy a device may be: the simulated queue beside the laboratory's, and what follows from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from relaygr_lab.bench.oracle import relayed

from relaygr_stream.ops.planner import utilisation as module
from relaygr_stream.ops.planner.utilisation import BUS_MS, LEAST_USE, MOST_USE, Work, answered, utilisation

#: Prefix, score, head start and SLO: of a feed and a search page on an NPU, of a GPU, of a processor.
DEVICES = [
    (Work(13.4, 1.0), Work(16.5, 0.01), 150.0, 50.0),
    (Work(2.4, 1.5), Work(4.7, 0.02), 150.0, 20.0),
    (Work(8.0, 0.3), Work(1.0, 0.1), 150.0, 20.0),
    (Work(40.0, 0.5), Work(8.0, 0.2), 150.0, 50.0),
]
requests = st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 5.0), st.floats(0.01, 3.0)), min_size=1, max_size=60)


@given(requests, st.floats(0.0, 20.0))
def test_without_slices_answers_are_those_of_the_laboratorys_queue(
    given: list[tuple[float, float, float]], lead: float
) -> None:
    gaps, prefixes, scores = (np.array(column) for column in zip(*given, strict=True))
    announced = np.cumsum(gaps)
    found = list(answered(announced.tolist(), prefixes.tolist(), scores.tolist(), lead, 1e-9))
    assert found == pytest.approx(relayed(announced, announced + lead, prefixes, scores, 1).tolist(), abs=1e-5)


def test_a_ranking_waits_for_the_slice_that_has_begun_and_no_longer() -> None:
    """The second request's prefix begins at 6 in slices of 4, and the first one's ranking comes at 7."""
    assert list(answered([0.0, 0.0], [6.0, 20.0], [1.0, 1.0], 7.0, 4.0)) == [4.0, 4.0 + 16.0 + 1.0]


@pytest.mark.parametrize("of", DEVICES)
def test_the_requests_are_typical(of: tuple[Work, Work, float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    found = utilisation(*of)
    module._utilisation.cache_clear()
    monkeypatch.setattr(module, "REQUESTS", 4 * module.REQUESTS)
    assert found == pytest.approx(utilisation(*of), rel=0.1)
    module._utilisation.cache_clear()


works = st.builds(Work, st.floats(0, 100), st.floats(0, 10))


@given(works, works, st.floats(0, 1000), st.floats(1, 1000), st.floats(1, 10))
def test_a_longer_slo_allows_no_less_use(prefix: Work, score: Work, lead: float, slo: float, longer: float) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "REQUESTS", 500)
        use, more = (module._utilisation.__wrapped__(prefix, score, lead, each) for each in (slo, slo * longer))
    assert LEAST_USE <= use <= more <= MOST_USE


def test_of_a_short_slo_half_is_left_for_the_device() -> None:
    one = Work(0.0, 0.0), Work(1.0, 0.5)
    assert LEAST_USE < utilisation(*one, 150.0, 2 * BUS_MS) < utilisation(*one, 150.0, 4 * BUS_MS)


def test_what_is_within_a_step_is_simulated_once() -> None:
    one = (Work(10.0, 0.5), Work(5.0, 0.0), 150.0, 50.0)
    use = utilisation(*one)
    before = module._utilisation.cache_info()
    assert utilisation(Work(10.001, 0.501), Work(5.001, 0.0005), 150.0, 50.0) == use
    assert module._utilisation.cache_info().hits == before.hits + 1


def test_it_is_a_function() -> None:
    found = utilisation(*DEVICES[0])
    module._utilisation.cache_clear()
    assert found == utilisation(*DEVICES[0])
