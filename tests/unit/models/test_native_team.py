"""The threads of the functions in C: they change no bit, sleep when idle, and hinder neither a fork nor the end."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaygr_stream.models.api import ScoreInput
from relaygr_stream.models.stu import StackConfig
from tests.properties import examples
from tests.unit.models.small_models import full_scores, held, prefilled, random_items, random_tokens, small_model
from tests.unit.models.test_native_layers import DTYPES, configs, in_each_kind, library, outputs, place, stack_of
from tests.waiting import WITHIN_S, until_blocking

#: What the helpers are called in /proc.
NAME = "relaygr-kernels"


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@in_each_kind
@settings(max_examples=examples(25))
@given(
    configs, st.integers(0, 600), st.integers(0, 300), st.integers(0, 40), st.integers(1, 300), st.integers(0, 999),
    st.integers(2, 5),
)  # fmt: skip
def test_threads_change_no_bit_of_any_stack(
    kind: str, config: StackConfig, prefix: int, more: int, suffix: int, candidates: int, seed: int, threads: int
) -> None:
    if config.contextual_seq_len:
        prefix, more, suffix = 0, prefix + more, 0
    x = torch.randn(prefix + more + suffix + candidates, config.dim, generator=torch.Generator().manual_seed(seed))
    x, cuts, stack = x.to(DTYPES[kind]), (prefix, prefix + more, prefix + more + suffix), stack_of(config, seed, kind)
    torch.set_num_threads(1)
    alone = outputs(stack, config, x, cuts)
    torch.set_num_threads(threads)
    assert all(map(torch.equal, outputs(stack, config, x, cuts), alone))


@in_each_kind
@settings(max_examples=examples(25))
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 200)), min_size=1, max_size=4), st.integers(2, 5),
    st.integers(0, 99),
)  # fmt: skip
def test_threads_change_no_bit_of_a_models_scores(
    kind: str, sizes: list[tuple[int, int]], threads: int, seed: int
) -> None:
    model, random = small_model(dim=32, dqk=32, dv=32), np.random.default_rng(seed)
    place(model, kind)
    tokens, found = random_tokens(random, 300), []
    suffixes = [(random_tokens(random, suffix), random_items(random, candidates)) for suffix, candidates in sizes]
    for count in (1, threads):
        torch.set_num_threads(count)
        region, before = prefilled(model, tokens), model.unknown_items
        scores = model.score([ScoreInput(region, suffix, candidates) for suffix, candidates in suffixes])
        found.append((*scores, held(region), torch.tensor(model.unknown_items - before)))
    assert all(map(torch.equal, *found))


@in_each_kind
def test_calls_at_the_same_time_are_each_right(kind: str) -> None:
    models, random = [small_model(dim=32, dqk=32, dv=32) for _ in range(3)], np.random.default_rng(1)
    for model in models:
        place(model, kind)
    tokens, items = random_tokens(random, 400), random_items(random, 90)
    torch.set_num_threads(1)
    alone, wrong = full_scores(models[0], tokens, items), []
    torch.set_num_threads(3)

    def run(index: int) -> None:
        for _ in range(20):
            if not torch.equal(full_scores(models[index], tokens, items), alone):
                wrong.append(index)

    callers = [threading.Thread(target=run, args=(index,)) for index in range(len(models))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def helper_states() -> list[str]:
    """The states of this process's helpers: R runs, S sleeps."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended since
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == NAME:
                found.append(rest.split()[0])
    return found


@in_each_kind
def test_helpers_are_as_many_as_are_wanted_and_sleep_when_idle(kind: str) -> None:
    model, random = small_model(dim=32, dqk=32, dv=32), np.random.default_rng(1)
    place(model, kind)
    torch.set_num_threads(3)
    full_scores(model, random_tokens(random, 90), random_items(random, 20))
    until_blocking(lambda: len(states := helper_states()) > 1 and "R" not in states, "two helpers, asleep")


#: Runs in a process of its own, one kind after the other: with its imports it takes seconds. The forked one makes no
#: large tensor, for which torch's own threads would be needed. Both have helpers, and end as Python does, where these
#: are joined.
FORK = """
import os, sys, time
import numpy as np, torch
from relaygr_stream.models.api import ScoreInput
from tests.unit.models.small_models import prefilled, random_items, random_tokens, small_model
from tests.unit.models.test_native_layers import place
from tests.unit.models.test_native_team import helper_states

torch.set_num_threads(2)
for kind in sys.argv[1:]:
    model, random = small_model(dim=32, dqk=32, dv=32), np.random.default_rng(1)
    place(model, kind)
    tokens, suffix = random_tokens(random, 300), random_tokens(random, 5)
    ranking = ScoreInput(prefilled(model, tokens), suffix, random_items(random, 50))
    scores = model.score([ranking])[0]
    child = os.fork()
    same = torch.equal(model.score([ranking])[0], scores)
    while not helper_states():
        time.sleep(0.001)
    if not child:
        sys.exit(not same)
    if not same or os.waitpid(child, 0)[1]:
        sys.exit(f"{kind}: {same=}")
"""


@pytest.mark.stack  # torch imported anew, and two models of each kind
def test_a_process_forks_and_ends_with_helpers() -> None:
    kinds = [kind for kind in DTYPES if library(kind) is not None]
    if not kinds:
        pytest.skip("needs a CPU with avx2, and make setup with a C compiler")
    command = [sys.executable, "-c", FORK, *kinds]
    clone = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
