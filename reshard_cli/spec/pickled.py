"""Reads a pickle as data: a small machine for the opcodes that build plain values, which never calls anything.

Python's own unpickler runs what the bytes say, and even a restricted one allocates what they claim. Here a
class or function is only a name (`Named`), and what would be called or built is a record of it (`Made`), so
that the worst that a pickle can do is to be refused. Dicts become lists of pairs, as keys are never hashed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

__all__ = ["Made", "Named", "Pairs", "read_pickle"]


@dataclass(frozen=True, slots=True)
class Named:
    """A class or function, by `module.name`."""

    name: str


@dataclass(slots=True)
class Made:
    """What calling `name` with these arguments would give, then updated with `state`."""

    name: str
    arguments: tuple[Any, ...]
    state: Any = None


class Pairs(list[tuple[Any, Any]]):
    """A dict's items, in order."""


_MARK, _STOP = ord("("), ord(".")
# how Python 3.11.0 to 3.11.3 write the member of an enumeration, by protocol
_MEMBER = ("builtins.getattr", "__builtin__.getattr")


def read_pickle(data: bytes, allowed: Collection[str]) -> Any:
    """Return the value of a pickle that names only these classes and functions.

    `torch.Size` of a tuple is that tuple, an OrderedDict its pairs, a persistent id a `Made` of that name, an enumeration's
    member what its class would give for its value or its name.
    Raises ValueError for any other name (which it tells), any other opcode, and damaged bytes.
    """
    machine = _Machine(data, allowed)
    try:
        return machine.run()
    except (IndexError, KeyError, struct.error) as error:
        raise ValueError(f"damaged near byte {machine.at}") from error


class _Machine:
    """The stack, the memo, and the position in the bytes."""

    def __init__(self, data: bytes, allowed: Collection[str]) -> None:
        self.data = data
        self.allowed = allowed
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data = self.data
        while True:
            code = data[self.at]
            self.at += 1
            if code == _STOP:
                if len(self.stack) != 1 or self.marks:
                    raise ValueError(f"damaged near byte {self.at}")
                return self.stack[0]
            step = _STEPS.get(code)
            if step is None:
                raise ValueError(f"byte {self.at - 1} is opcode {code:#04x}, which plain data does not need")
            step(self)

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes. Never allocates more than there is."""
        start = self.at
        self.at += num_bytes
        if not 0 <= num_bytes <= len(self.data) - start:
            raise IndexError
        return self.data[start : self.at]

    def whole(self, num_bytes: int, *, signed: bool = False) -> int:
        return int.from_bytes(self.take(num_bytes), "little", signed=signed)

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end].decode("ascii")
        self.at = end + 1
        return text

    def push_text(self, width: int) -> None:
        self.stack.append(self.take(self.whole(width)).decode("utf-8"))

    def push_bytes(self, width: int) -> None:
        self.stack.append(self.take(self.whole(width)))

    def push_whole(self, width: int, signed: bool = False) -> None:
        self.stack.append(self.whole(width, signed=signed))

    def push_long(self) -> None:
        self.push_whole(self.whole(1), signed=True)

    def push_float(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def push_tuple(self, length: int) -> None:
        if length > len(self.stack):
            raise IndexError
        items = tuple(self.stack[len(self.stack) - length :])
        del self.stack[len(self.stack) - length :]
        self.stack.append(items)

    def tuple_marked(self) -> None:
        items = tuple(self.marked())
        self.stack.append(items)

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def marked(self) -> list[Any]:
        """Return what was pushed since the last mark."""
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError(f"damaged near byte {self.at}: appends to what is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, Pairs) or len(items) % 2:
            raise ValueError(f"damaged near byte {self.at}: sets items of what is no dict")
        target.extend(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def append_one(self) -> None:
        self.append([self.stack.pop()])

    def name(self, module: Any, name: Any) -> None:
        full = f"{module}.{name}" if isinstance(module, str) and isinstance(name, str) else ""
        if full not in self.allowed and full not in _MEMBER:
            raise ValueError(f"names {full or 'no class'!r}, which plain data does not need; it was not run")
        self.stack.append(Named(full))

    def global_name(self) -> None:
        self.name(self.line(), self.line())

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Named) or not isinstance(arguments, tuple):
            raise ValueError(f"damaged near byte {self.at}: calls what has no name")
        if function.name in _MEMBER:
            if (
                len(arguments) != 2
                or not isinstance(arguments[0], Named)
                or not isinstance(arguments[1], str)
            ):
                raise ValueError(f"names {function.name!r} of something else than a class; it was not run")
            self.stack.append(Made(arguments[0].name, (arguments[1],)))
        elif function.name == "torch.Size" and len(arguments) == 1 and isinstance(arguments[0], tuple):
            self.stack.append(arguments[0])
        elif function.name == "collections.OrderedDict" and not arguments:
            self.stack.append(Pairs())
        else:
            self.stack.append(Made(function.name, arguments))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Made):
            raise ValueError(f"damaged near byte {self.at}: gives a state to what has none")
        target.state = state

    def persistent(self) -> None:
        self.stack.append(Made("persistent", (self.stack.pop(),)))

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def skip(self, num_bytes: int) -> None:
        self.take(num_bytes)


_STEPS: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda machine: machine.skip(1),  # PROTO
    0x95: lambda machine: machine.skip(8),  # FRAME: how much could be read ahead
    _MARK: _Machine.mark,
    ord("0"): lambda machine: machine.stack.pop(),
    ord("N"): lambda machine: machine.stack.append(None),
    0x88: lambda machine: machine.stack.append(True),
    0x89: lambda machine: machine.stack.append(False),
    ord("K"): lambda machine: machine.push_whole(1),
    ord("M"): lambda machine: machine.push_whole(2),
    ord("J"): lambda machine: machine.push_whole(4, True),
    0x8A: _Machine.push_long,
    ord("G"): _Machine.push_float,
    0x8C: lambda machine: machine.push_text(1),
    ord("X"): lambda machine: machine.push_text(4),
    0x8D: lambda machine: machine.push_text(8),
    ord("C"): lambda machine: machine.push_bytes(1),
    ord("B"): lambda machine: machine.push_bytes(4),
    ord(")"): lambda machine: machine.push_tuple(0),
    0x85: lambda machine: machine.push_tuple(1),
    0x86: lambda machine: machine.push_tuple(2),
    0x87: lambda machine: machine.push_tuple(3),
    ord("t"): _Machine.tuple_marked,
    ord("]"): lambda machine: machine.stack.append([]),
    ord("a"): _Machine.append_one,
    ord("e"): lambda machine: machine.append(machine.marked()),
    ord("}"): lambda machine: machine.stack.append(Pairs()),
    ord("s"): _Machine.set_item,
    ord("u"): lambda machine: machine.set_items(machine.marked()),
    0x94: lambda machine: machine.put(len(machine.memo)),  # MEMOIZE
    ord("q"): lambda machine: machine.put(machine.whole(1)),
    ord("r"): lambda machine: machine.put(machine.whole(4)),
    ord("h"): lambda machine: machine.stack.append(machine.memo[machine.whole(1)]),
    ord("j"): lambda machine: machine.stack.append(machine.memo[machine.whole(4)]),
    ord("c"): _Machine.global_name,
    0x93: _Machine.stack_name,
    0x81: _Machine.call,  # NEWOBJ
    ord("R"): _Machine.call,
    ord("b"): _Machine.build,
    ord("Q"): _Machine.persistent,
}
