"""Functions with one check taken out, made from their source: what a test suite must notice.

Each weakening drops one element of compared or returned tuples, one operand of an `or` or `and`, one `if` that refuses,
one alternative of a returned conditional, a returned comparison, or one statement that changes something.
"""

from __future__ import annotations
import __future__

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType


@dataclass(frozen=True)
class Weakening:
    """One function without one of its checks."""

    function: FunctionType
    what: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.function.__qualname__}: {self.what}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The weakened function in the place of the real one, for every module that uses it."""
        real = self.function.__code__
        self.function.__code__ = self.code
        try:
            yield
        finally:
            self.function.__code__ = real


def weakenings(function: FunctionType) -> list[Weakening]:
    """Every way to weaken a function."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list.clear()
    return [Weakening(function, what, _compiled(function, changed)) for what, changed in _changes(definition)]


def _changes(definition: ast.FunctionDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    nodes = list(ast.walk(definition))
    for at, node in enumerate(nodes):
        if isinstance(node, ast.BoolOp):
            for index, value in enumerate(node.values):
                yield f"without `{ast.unparse(value)}`", _edited(definition, at, _dropped_operand(index))
        elif isinstance(node, ast.If) and isinstance(node.body[-1], ast.Return | ast.Raise):
            yield f"without `if {ast.unparse(node.test)}`", _edited(definition, at, _never)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.IfExp):
            yield f"always `{ast.unparse(node.value.body)}`", _edited(definition, at, _always_body)
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Compare):
            yield f"always true instead of `{ast.unparse(node.value)}`", _edited(definition, at, _true)
        elif _changes_something(node):
            yield f"without `{ast.unparse(node)}`", _edited(definition, at, _nothing)
    yield from _without_elements(definition, nodes)


def _without_elements(definition: ast.FunctionDef, nodes: list[ast.AST]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """One element out of every compared tuple, and out of all tuples of that length that belong to the comparison."""
    tuples = [at for at, node in enumerate(nodes) if _is_compared(node, nodes)]
    for length in sorted({len(_elements(nodes[at])) for at in tuples}):
        group = [at for at in tuples if len(_elements(nodes[at])) == length]
        for index in range(length if length > 1 else 0):
            changed = copy.deepcopy(definition)
            copies = list(ast.walk(changed))
            for at in group:
                del _elements(copies[at])[index]
            yield f"without `{ast.unparse(_elements(nodes[group[0]])[index])}`", changed


def _is_compared(node: ast.AST, nodes: list[ast.AST]) -> bool:
    if not isinstance(node, ast.Tuple | ast.List) or not isinstance(node.ctx, ast.Load):
        return False
    for parent in nodes:
        if isinstance(parent, ast.Compare) and (parent.left is node or node in parent.comparators):
            return True
        if isinstance(parent, ast.Return | ast.Assign) and parent.value is node:
            return True
        if isinstance(parent, ast.Call) and isinstance(node, ast.List) and node in parent.args:
            return True
    return False


def _elements(node: ast.AST) -> list[ast.expr]:
    assert isinstance(node, ast.Tuple | ast.List)
    return node.elts


def _changes_something(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.AugAssign):
        return True
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)


def _edited(definition: ast.FunctionDef, at: int, edit: Callable[[ast.AST], ast.AST]) -> ast.FunctionDef:
    changed = copy.deepcopy(definition)
    target = list(ast.walk(changed))[at]

    class Editor(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return edit(node) if node is target else self.generic_visit(node)

    Editor().visit(changed)
    return changed


def _dropped_operand(index: int) -> Callable[[ast.AST], ast.AST]:
    def edit(node: ast.AST) -> ast.AST:
        assert isinstance(node, ast.BoolOp)
        rest = [value for at, value in enumerate(node.values) if at != index]
        return rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)

    return edit


def _never(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.If)
    return ast.If(ast.Constant(False), node.body, node.orelse)


def _always_body(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Return)
    assert isinstance(node.value, ast.IfExp)
    return ast.Return(node.value.body)


def _true(_: ast.AST) -> ast.AST:
    return ast.Return(ast.Constant(True))


def _nothing(_: ast.AST) -> ast.AST:
    return ast.Pass()


def _compiled(function: FunctionType, definition: ast.FunctionDef) -> CodeType:
    module = ast.fix_missing_locations(ast.Module([definition], []))
    code = compile(module, f"<weakened {function.__qualname__}>", "exec", __future__.annotations.compiler_flag)
    return next(const for const in code.co_consts if isinstance(const, CodeType) and const.co_name == function.__name__)
