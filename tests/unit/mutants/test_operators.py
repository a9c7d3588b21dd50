"""What is mutated in a source, and what is left alone."""

from __future__ import annotations

import pytest

from tests.mutants.operators import mutations


def changed(source: str) -> set[str]:
    """The sources that mutations make of it, less what stays the same around them."""
    return {mutation.apply(source) for mutation in mutations(source)}


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("x = a < b", {"x = (a <= b)", "x = (a >= b)"}),
        ("x = a is b in c", {"x = (a is not b in c)", "x = (a is b not in c)"}),
        ("x = a and b", {"x = (b)", "x = (a)"}),
        ("x = a or b or c", {"x = (b or c)", "x = (a or c)", "x = (a or b)"}),
        ("x = a * (b + c)", {"x = (a / (b + c))", "x = a * ((b - c))"}),
        ("x = not a", {"x = (a)"}),
        ("x = -a", {"x = (a)"}),
        ("x = max(a, b)", {"x = (min(a, b))"}),
        ("x = 1, 20, True", {"x = 2, 20, True", "x = 1, 40, True", "x = 1, 20, False"}),
        ("if a:\n    b = c", {"if (not a):\n    b = c"}),
        ("x = b if a else c", {"x = (b if not a else c)"}),
        ("a()", {"pass"}),
        ("a.b = c", {"pass"}),
        ("a += b", {"pass", "a -= b"}),
        ("raise A(1 + 2)", {"pass"}),
        ("def f(a=False, *, b=0): ...", {"def f(a=True, *, b=0): ...", "def f(a=False, *, b=1): ..."}),
        ("def f():\n    return a", {"def f():\n    return None"}),
        ("def f():\n    return", {"def f():\n    pass"}),
        ("x = 'ä', a < b  # ü", {"x = 'ä', (a <= b)  # ü", "x = 'ä', (a >= b)  # ü"}),
        ("match a:\n    case 1 if b == c: ...", {"match a:\n    case 1 if (b != c): ..."}),
    ],
)  # fmt: skip
def test_a_mutant_changes_one_thing(source: str, mutants: set[str]) -> None:
    assert changed(source) == mutants


@pytest.mark.parametrize(
    "source",
    [
        '"""1 < 2"""',
        "import a",
        "assert a < b, 1",
        "x: Literal[1] = y",
        "x = f'{a + 1}'",
        "x = 'a' + b",
        "log.info('done', seconds=1)",
        "if TYPE_CHECKING:\n    from a import b",
        "@a(1)\ndef f(b: Literal[2]) -> Literal[3]: ...",
    ],
)
def test_what_says_nothing_of_behaviour_is_left_alone(source: str) -> None:
    assert changed(source) == set()


def test_a_mutation_knows_its_statement() -> None:
    (found,) = (m for m in mutations("if (\n    a\n    < b\n):\n    c = d\n") if m.after == "(a <= b)")
    assert (found.line, found.first, found.last, found.at_import) == (2, 1, 4, True)
    (found,) = mutations("def f():\n    return (\n        a\n    )\n")
    assert (found.first, found.last, found.at_import) == (2, 4, False)
