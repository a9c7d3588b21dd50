"""The list of mutants names text that is there: a change of the code is a change of the list, seen at once."""

from __future__ import annotations

from pathlib import Path

import pytest

import relaygr_stream
from tests.mutants.listed import MUTANTS, Mutant

PACKAGE = Path(relaygr_stream.__file__).parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.text.strip()[:40]}")
def test_the_text_stands_once_and_its_tests_are_there(mutant: Mutant) -> None:
    assert (PACKAGE / mutant.file).read_text(encoding="utf-8").count(mutant.text) == 1
    for name in mutant.tests.split():
        assert (Path(__file__).parent / f"{name.split('::')[0]}.py").is_file(), name
