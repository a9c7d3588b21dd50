"""Mutations of a Python source: what each operator changes, as text to put in place of a node's text.

Left alone are annotations, docstrings, f-strings, assertions, decorators, and what is logged or said by an error.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeVar

Node = TypeVar("Node", bound=ast.AST)

#: Per comparison its boundary, then its opposite.
COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
EXTREMES: Final = {"min": "max", "max": "min"}
#: Of these types a sum is no arithmetic, and its other operator only a TypeError.
_TEXTS: Final = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
#: Larger constants are doubled: nobody tells 60 from 61.
_SMALL: Final = 10


class Mutation(NamedTuple):
    """One change of one source. start and end count bytes; first and last are the lines of the statement, without its
    body. at_import: it runs when the module is loaded, not when a function of it is called."""

    operator: str
    line: int
    start: int
    end: int
    before: str
    after: str
    first: int
    last: int
    at_import: bool

    def apply(self, source: str) -> str:
        """`source` with the change."""
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()


def mutations(source: str) -> list[Mutation]:
    """Every mutation of a module, in the order of its lines. Raises SyntaxError."""
    return sorted(_Walk(source).of_block(ast.parse(source), True), key=lambda found: (found.line, found.start))


class _Walk:
    """The walk through one source."""

    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def of_block(self, node: ast.AST, at_import: bool) -> Iterator[Mutation]:
        """Of the statements directly within a module, class, function or branch."""
        for name, value in ast.iter_fields(node):
            if name in ("body", "orelse", "finalbody", "handlers", "cases") and isinstance(value, list):
                for child in value:
                    yield from self.of_statement(child, at_import)

    def of_statement(self, node: ast.AST, at_import: bool) -> Iterator[Mutation]:
        """Of one statement, handler or case, and of what stands within it."""
        if _is_left_alone(node):
            return
        lines = _header(node)
        for operator, changed in _of_statement(node):
            yield self._mutation(operator, node, ast.unparse(changed), lines, at_import)
        if isinstance(node, ast.If | ast.While) and _is_one_condition(node.test):
            yield self._mutation("not", node.test, f"(not {ast.unparse(node.test)})", lines, at_import)
        function = False
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = True
            yield from self._of_defaults(node.args, lines, at_import)
        elif not isinstance(node, ast.Raise | ast.ClassDef):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr | ast.withitem) and child is not getattr(node, "annotation", None):
                    yield from self._of_expression(child, lines, at_import)
        yield from self.of_block(node, at_import and not function)

    def _of_expression(
        self, node: ast.AST, lines: tuple[int, int], at_import: bool, default: bool = False
    ) -> Iterator[Mutation]:
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Lambda):
            yield from self._of_defaults(node.args, lines, at_import)
            yield from self._of_expression(node.body, lines, at_import)
            return
        for operator, changed in _of_expression(node):
            text = ast.unparse(changed)
            text = text if isinstance(changed, ast.Constant) else f"({text})"
            yield self._mutation("default argument" if default else operator, node, text, lines, at_import)
        for child in ast.iter_child_nodes(node):
            yield from self._of_expression(child, lines, at_import, default)

    def _of_defaults(self, arguments: ast.arguments, lines: tuple[int, int], at_import: bool) -> Iterator[Mutation]:
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None:
                yield from self._of_expression(default, lines, at_import, default=True)

    def _mutation(self, operator: str, node: ast.AST, after: str, lines: tuple[int, int], at_import: bool) -> Mutation:
        assert isinstance(node, ast.stmt | ast.expr) and node.end_lineno and node.end_col_offset is not None
        start = self._starts[node.lineno - 1] + node.col_offset
        end = self._starts[node.end_lineno - 1] + node.end_col_offset
        before = self._data[start:end].decode()
        return Mutation(operator, node.lineno, start, end, before, after, *lines, at_import)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger" | "_log")))):
            return True
    return False


def _header(node: ast.AST) -> tuple[int, int]:
    """First and last line of a statement, without its body."""
    if isinstance(node, ast.match_case):
        return node.pattern.lineno, node.body[0].lineno
    assert isinstance(node, ast.stmt | ast.ExceptHandler) and node.end_lineno
    body = getattr(node, "body", None) or getattr(node, "cases", None)
    if not body:
        return node.lineno, node.end_lineno
    inside = body[0].pattern.lineno if isinstance(body[0], ast.match_case) else body[0].lineno
    return node.lineno, max(node.lineno, inside - 1)


def _of_statement(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """A statement that is left out, and a result that is not returned."""
    match node:
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "statement removed", ast.Pass()
        case ast.Raise() | ast.Continue() | ast.Break() | ast.Return(value=None):
            yield "statement removed", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "statement removed", ast.Pass()
        case ast.Return(value=value) if not isinstance(value, ast.Constant):
            yield "returns None", _edited(node, value=ast.Constant(None))
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", _edited(node, op=ARITHMETIC[type(node.op)]())


def _of_expression(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield "comparison", _edited(node, ops=[*ops[:index], other(), *ops[index + 1 :]])
        case ast.BoolOp(values=values):
            for index in range(len(values)):
                left = [*values[:index], *values[index + 1 :]]
                yield "arm dropped", _edited(node, values=left) if len(left) > 1 else left[0]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "not" if isinstance(node.op, ast.Not) else "arithmetic", operand
        case ast.BinOp(op=op, left=one, right=other) if type(op) in ARITHMETIC:
            if not any(isinstance(side, _TEXTS) or _is_text(side) for side in (one, other)):
                yield "arithmetic", _edited(node, op=ARITHMETIC[type(op)]())
        case ast.Call(func=ast.Name(id=name)) if name in EXTREMES:
            yield "extreme", _edited(node, func=ast.Name(EXTREMES[name]))
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1 if abs(value) < _SMALL else value * 2)
        case ast.IfExp(test=test) if _is_one_condition(test):
            yield "not", _edited(node, test=ast.UnaryOp(ast.Not(), test))


def _is_one_condition(test: ast.AST) -> bool:
    """Without a part whose own mutations turn it round."""
    return not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def _edited(node: Node, **fields: object) -> Node:
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})
