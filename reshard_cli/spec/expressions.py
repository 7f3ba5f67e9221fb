"""Whole-number expressions of named sizes, as model documents write shapes: `heads * head_dim`.

Parsed by Python's grammar and then walked by hand: only names, whole numbers, + - * // ( ) and
`ceil_div(a, b)` are understood, so nothing in a document is ever executed.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

__all__ = ["evaluate"]

_LIMIT = 2**62


def evaluate(expression: str | int, sizes: Mapping[str, int]) -> int:
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
    value = _walk(tree.body, sizes, expression)
    if abs(value) > _LIMIT:
        raise ValueError(f"{expression!r} is larger than 2**62")
    return value


def _walk(node: ast.expr, sizes: Mapping[str, int], text: str) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.Name):
        if node.id in sizes:
            return sizes[node.id]
        raise ValueError(f"no size is named {node.id!r} (sizes: {', '.join(sizes) or 'none'})")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_walk(node.operand, sizes, text)
    if isinstance(node, ast.BinOp):
        left, right = _walk(node.left, sizes, text), _walk(node.right, sizes, text)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.FloorDiv):
            if right == 0:
                raise ValueError(f"{text!r} divides by zero")
            return left // right
        if isinstance(node.op, ast.Div):
            raise ValueError(f"{text!r}: write // (whole-number division) instead of /")
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "ceil_div"
        and len(node.args) == 2
        and not node.keywords
    ):
        left, right = (_walk(argument, sizes, text) for argument in node.args)
        if right == 0:
            raise ValueError(f"{text!r} divides by zero")
        return -(-left // right)
    raise ValueError(f"{text!r} uses more than sizes, whole numbers, + - * // and ceil_div")
