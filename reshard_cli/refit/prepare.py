"""From a refit's options to its layouts: everything that can be read and checked before any rank is met."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from reshard_cli.errors import DocumentError, Problem
from reshard_cli.layout.job import JobLayout, build_layout
from reshard_cli.plan.routes import Mode
from reshard_cli.plan.topology import Topology
from reshard_cli.spec.layout_document import LoadedLayout, read_layout_document
from reshard_cli.spec.model import Model
from reshard_cli.spec.model_document import read_model

__all__ = [
    "Jobs",
    "RefitOptions",
    "check_timeout",
    "check_token",
    "model_path",
    "parse_domain",
    "read_jobs",
]

_LONGEST_TIMEOUT = 1_000_000.0  # seconds: transports count milliseconds in 32 bits

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class RefitOptions:
    """What the command line says. staging in bytes, timeout in seconds; origin and target as written.

    `iterations` is None where a loop goes on until somebody ends it.
    """

    source: Path
    destination: Path
    model: Path | None = None
    mode: Mode = "hybrid"
    origin: str = "synthetic"
    target: str = "memory"
    iterations: int | None = 1
    watch: Path | None = None
    double_buffer: bool = False
    verify: bool = False
    staging: int = 512 << 20
    timeout: float = 120.0
    backend: str = "auto"
    domain: str | None = None
    colocated: bool = False
    allow_extra: bool = False
    trust_checkpoint: bool = False
    m2n: bool = False


@dataclass(frozen=True, slots=True)
class Jobs:
    """The two jobs' layouts."""

    source: JobLayout
    destination: JobLayout

    def num_ranks(self, colocated: bool) -> int:
        """Return the size of the joint world."""
        one, other = self.source.num_ranks, self.destination.num_ranks
        return max(one, other) if colocated else one + other

    def topology(self, domain: int | None, colocated: bool) -> Topology:
        """Return the topology by the documents, or with `domain` ranks per domain in both jobs."""
        one, other = self.source.loaded.document, self.destination.loaded.document
        return Topology.of_jobs(
            one.ranks, other.ranks, domain or one.domain, domain or other.domain, colocated=colocated
        )

    def name_of(self, rank: int, colocated: bool) -> str:
        """Return a world rank as people know it: `rank 5 (infer 1)`."""
        parts = []
        if rank < self.source.num_ranks:
            parts.append(f"{self.source.name} {rank}")
        local = rank if colocated else rank - self.source.num_ranks
        if 0 <= local < self.destination.num_ranks:
            parts.append(f"{self.destination.name} {local}")
        return f"rank {rank} ({', '.join(parts)})"


def parse_domain(text: str | None, flag: str = "--domain") -> int | None:
    """Return the number of `--domain`, None for `auto` or no flag. Raises DocumentError."""
    if text is None or text == "auto":
        return None
    if not re.fullmatch(r"[1-9]\d{0,8}", str(text)):
        raise DocumentError(f"{flag}: {text!r} is neither a number of ranks nor 'auto'")
    return int(text)


def check_timeout(seconds: float, flag: str) -> None:
    """Refuse a timeout that no transport can wait for. Raises DocumentError."""
    if not isinstance(seconds, (int, float)) or not 0 < seconds <= _LONGEST_TIMEOUT:
        raise DocumentError(
            f"{flag}: {seconds!r} is not a number of seconds, more than 0 and at most {_LONGEST_TIMEOUT:,.0f}"
        )


def check_token(token: str, flag: str) -> None:
    """Refuse a secret of which no proof can be made. Raises DocumentError."""
    if not isinstance(token, str):
        raise DocumentError(f"{flag}: the secret is a text, not {type(token).__name__}")
    if not token:
        raise DocumentError(f"{flag}: jobs that join need a shared secret, which is not empty")
    try:
        token.encode()
    except UnicodeEncodeError as error:
        raise DocumentError(f"{flag}: the secret has characters that are no text (UTF-8)") from error


def read_jobs(
    source: Path,
    destination: Path,
    model: Path | None = None,
    fallback: Path | None = None,
    *,
    trust: bool = False,
) -> Jobs:
    """Read both documents and their models; return the layouts.

    The model is `model`, else each document's own, else the other document's, else `fallback` (the
    checkpoint to be read). `trust`: it may be a DCP folder. Raises DocumentError with the problems of both documents at once.
    """
    loaded = _both(lambda: read_layout_document(source), lambda: read_layout_document(destination))
    own = [model_path(one, model) for one in loaded]
    models: list[Model] = []
    known: dict[Path, Model] = {}
    for one, path in zip(loaded, (own[0] or own[1] or fallback, own[1] or own[0] or fallback), strict=True):
        if path is None:
            raise DocumentError(f"{one.path}: names no `model`; add one, or give --model")
        if path not in known:
            known[path] = read_model(path, trust=trust)
        models.append(known[path])
    return Jobs(
        *_both(*(functools.partial(build_layout, *pair) for pair in zip(loaded, models, strict=True)))
    )


def _both(*makers: Callable[[], Made]) -> list[Made]:
    """Return what each of these makes; if several raise with problems, raise all problems at once."""
    made: list[Made] = []
    problems: list[Problem] = []
    for maker in makers:
        try:
            made.append(maker())
        except DocumentError as error:
            if not error.problems:
                raise
            problems += error.problems
    if problems:
        raise DocumentError(problems=problems)
    return made


def model_path(loaded: LoadedLayout, override: Path | None) -> Path | None:
    """Return where a document's model is: `override`, else what it names. Raises DocumentError."""
    if override is not None:
        return override
    text = loaded.document.model
    if text is None:
        return None
    path = loaded.path.parent / text
    if not path.exists():
        problem = loaded.located.problem(
            ("model",), f"{path} does not exist (it is looked up from this file)"
        )
        raise DocumentError(problems=[problem])
    return path.resolve()
