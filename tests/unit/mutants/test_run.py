"""A whole run on a toy package: what its tests check is killed, what they do not survives."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutants.__main__ import main

pytestmark = pytest.mark.stack  # each runs a pytest of its own for each mutant

SOURCE = """
def is_child(age):
    return age < 18


def unused(number):
    return number


def is_old(age):
    return age > 60
"""
TESTS = """
from toy.ages import is_child, is_old

def test_child():
    assert is_child(17)
    assert not is_child(18)

def test_old():
    assert is_old(90)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").touch()
    (tmp_path / "toy" / "ages.py").write_text(SOURCE)
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "test_people.py").write_text(TESTS)
    for command in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_what_tests_check_is_killed_and_what_they_do_not_survives(
    toy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = toy / "toy" / "ages.py"
    source.write_text(changed := SOURCE.replace("age > 60", "60 < age").replace("number\n", "bool(number)\n"))
    assert main(["--since", "HEAD", "--at-least", "61"], toy, "toy") == 1
    said = capsys.readouterr().out.splitlines()
    assert "5 mutants of 1 modules" in said, "of the lines that have changed"
    assert [line for line in said if line.startswith(("SURVIVED:", "NOT REACHED:"))] == [
        "NOT REACHED: toy/ages.py:7: returns None: `return bool(number)` → `return None`",
        "SURVIVED: toy/ages.py:11: comparison: `60 < age` → `(60 <= age)`",
    ]
    assert said[-1].startswith("score 60 %")
    assert source.read_text() == changed


def test_the_score_is_judged_and_a_sample_is_the_same_each_time(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(seed: int) -> str:
        assert main(["ages.py", "--list", "--sample", "3", "--seed", str(seed)], toy, "toy") == 0
        return capsys.readouterr().out

    assert listed(1) == listed(1)
    assert len({listed(seed) for seed in range(5)}) > 1


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"], ["--since", "no-such-commit"], ["../tests"]])
def test_what_cannot_be_chosen_is_said(arguments: list[str], toy: Path) -> None:
    with pytest.raises(SystemExit, match="mutants: "):
        main(arguments, toy, "toy")
