"""Whole-number expressions of named sizes, as model documents write shapes: `heads * head_dim`.

Parsed by Python's grammar and then walked by hand: only names, whole numbers, + - * // % ( ),
`ceil_div(a, b)`, `min`, `max` and comparisons (1 or 0) are understood, so nothing in a document is ever
executed. A caller may add functions of text and numbers of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

__all__ = ["Function", "evaluate"]

_LIMIT = 2**62
_KNOWN = "sizes, whole numbers, + - * // %, comparisons, ceil_div, min and max"
Function = Callable[..., int]


def evaluate(
    expression: str | int, sizes: Mapping[str, int], functions: Mapping[str, Function] | None = None
) -> int:
    """Return the value of `expression`. Raises ValueError with the reason where it has none."""
    if isinstance(expression, bool) or not isinstance(expression, (int, str)):
        raise ValueError(f"{expression!r} is neither a whole number nor an expression")
    if isinstance(expression, int):
        return expression
    if len(expression) > 500:
        raise ValueError("an expression of more than 500 characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is not an expression of sizes, + - * // and ceil_div") from error
    value = _Walk(sizes, functions or {}, expression).value(tree.body)
    if abs(value) > _LIMIT:
        raise ValueError(f"{expression!r} is larger than 2**62")
    return value


class _Walk:
    """Evaluates the nodes of one expression."""

    def __init__(self, sizes: Mapping[str, int], functions: Mapping[str, Function], text: str) -> None:
        self.sizes = sizes
        self.functions = functions
        self.text = text

    def value(self, node: ast.expr) -> int:
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, int)
            and not isinstance(node.value, bool)
        ):
            return node.value
        if isinstance(node, ast.Name):
            if node.id in self.sizes:
                return self.sizes[node.id]
            known = ", ".join(self.sizes) or "none"
            raise ValueError(f"no size is named {node.id!r} (sizes: {known})")
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.value(node.operand)
        if isinstance(node, ast.BinOp):
            return self.operation(node)
        if isinstance(node, ast.BoolOp):
            # one after the other, so that `a and b` may guard b by a, as in Python
            for operand in node.values:
                found = self.value(operand)
                if bool(found) is isinstance(node.op, ast.Or):
                    return found
            return found
        if isinstance(node, ast.IfExp):
            return self.value(node.body if self.value(node.test) else node.orelse)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self.comparison(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self.call(node.func.id, node.args)
        raise ValueError(f"{self.text!r} uses more than {_KNOWN}")

    def operation(self, node: ast.BinOp) -> int:
        left, right = self.value(node.left), self.value(node.right)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, (ast.FloorDiv, ast.Mod)):
            if right == 0:
                raise ValueError(f"{self.text!r} divides by zero")
            return left // right if isinstance(node.op, ast.FloorDiv) else left % right
        if isinstance(node.op, ast.Div):
            raise ValueError(f"{self.text!r}: write // (whole-number division) instead of /")
        raise ValueError(f"{self.text!r} uses more than {_KNOWN}")

    def comparison(self, node: ast.Compare) -> int:
        left, right, sign = self.value(node.left), self.value(node.comparators[0]), node.ops[0]
        outcomes: dict[type[ast.cmpop], bool] = {
            ast.Eq: left == right, ast.NotEq: left != right, ast.Lt: left < right,
            ast.LtE: left <= right, ast.Gt: left > right, ast.GtE: left >= right,
        }  # fmt: skip
        if type(sign) not in outcomes:
            raise ValueError(f"{self.text!r} uses more than {_KNOWN}")
        return int(outcomes[type(sign)])

    def call(self, name: str, arguments: list[ast.expr]) -> int:
        if name in self.functions:
            values = [
                node.value
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                else self.value(node)
                for node in arguments
            ]
            return self.functions[name](*values)
        if name in ("min", "max") and len(arguments) >= 2:
            found = [self.value(argument) for argument in arguments]
            return min(found) if name == "min" else max(found)
        if name == "ceil_div" and len(arguments) == 2:
            left, right = (self.value(argument) for argument in arguments)
            if right == 0:
                raise ValueError(f"{self.text!r} divides by zero")
            return -(-left // right)
        raise ValueError(f"{self.text!r} uses more than {_KNOWN}")
