"""The errors that a user can cause or meet, one class for each exit code.

    ReshardError
    ├── DocumentError    2   a document or a flag is wrong
    ├── WeightsError     3   the weights do not fit the documents
    ├── TransferError    4   the transfer failed: a rank raised, or came with another plan
    │   └── PeerLostError    as seen by a peer: a connection closed, or nothing came in time
    └── VerifyError      5   a destination element is not what it should be

Each message says what is wrong, where, and what would be right. The command line prints it without a
traceback; everything else that escapes is a fault of this program and keeps its traceback.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "DocumentError",
    "PeerLostError",
    "Problem",
    "ReshardError",
    "TransferError",
    "VerifyError",
    "WeightsError",
    "error_of_exit_code",
    "first_line",
    "listed",
    "printable",
]


class ReshardError(Exception):
    """A failure with a message for people and an exit code for scripts.

    Names in it may come from a file or from another job: characters that would steer the terminal are escaped.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message))


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a document: its file, line (1-based), key path, what is wrong, and the mend."""

    file: str
    line: int
    key: str
    message: str

    def __str__(self) -> str:
        key = f" {self.key}:" if self.key else ""
        return f"{self.file}:{self.line}:{key} {self.message}"


class DocumentError(ReshardError):
    """A document or a flag is wrong. Carries every problem that one reading found."""

    exit_code = 2

    def __init__(self, message: str = "", problems: list[Problem] | None = None) -> None:
        self.problems = problems or []
        lines = ([message] if message else []) + [str(problem) for problem in self.problems]
        super().__init__("\n".join(lines))


class WeightsError(ReshardError):
    """A tensor is missing, extra, of another shape or dtype, or its file is corrupt."""

    exit_code = 3


class TransferError(ReshardError):
    """A rank was lost, was late, raised, or came with another plan. `rank` is the guilty one, if known."""

    exit_code = 4

    def __init__(self, message: str, rank: int | None = None) -> None:
        self.rank = rank
        super().__init__(message)


class PeerLostError(TransferError):
    """A peer closed its connection or did not answer in time: perhaps the echo of another rank's failure."""


class VerifyError(ReshardError):
    """A destination element differs from the value found without the plan."""

    exit_code = 5


def printable(text: str) -> str:
    """Return a text whose characters can all be seen, but for the ends of its lines; others are escaped."""
    if text.replace("\n", "").isprintable():
        return text
    return "".join(one if one == "\n" or one.isprintable() else repr(one)[1:-1] for one in text)


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says: libraries put their own traces behind it."""
    return str(error).partition("\n")[0]


def error_of_exit_code(exit_code: int, message: str) -> ReshardError:
    """Return the error whose class has this exit code; codes outside the tree become a TransferError."""
    classes: dict[int, type[ReshardError]] = {
        kind.exit_code: kind for kind in (DocumentError, WeightsError, TransferError, VerifyError)
    }
    return classes.get(exit_code, TransferError)(message)


def listed(names: list[str], shown: int = 12) -> str:
    """Return tensor names for a message: how many, the first ones, and how many more."""
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{len(names)} tensor(s): {', '.join(names[:shown])}{more}"
