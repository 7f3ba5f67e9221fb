"""The two ends of a refit over its whole life: where each version's values come from, and where they go.

A source end gives a version's values; a destination end gives the memory that takes them, and knows which version
it holds whole. Both say when the memory behind them has changed, as what was prepared for it is then of no use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from reshard_cli.errors import TransferError, WeightsError
from reshard_cli.layout.job import JobLayout
from reshard_cli.layout.storage import RankStorage, rank_storages
from reshard_cli.plan.build import Plan
from reshard_cli.refit.endpoints import Destination, open_source
from reshard_cli.weights.live import Hooks, LiveTensors, place_of, snapshot
from reshard_cli.weights.quantise import QuantisingSource, made_of
from reshard_cli.weights.rank_folder import PendingFolder
from reshard_cli.weights.sharing import sharing_faults
from reshard_cli.weights.streams import settle
from reshard_cli.weights.tensors import torch_dtype
from reshard_cli.weights.windows import Source, StorageWindows

__all__ = [
    "DestinationEnd",
    "FolderEnd",
    "LiveEnd",
    "LiveSourceEnd",
    "MemoryEnd",
    "OriginEnd",
    "SourceEnd",
]


_KEPT_OPEN = 16  # plans of jobs that take one version


class _Storages:
    """A rank's storages, worked out once for each layout, and not at every refit."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], list[RankStorage]] = {}

    def of(self, layout: JobLayout, rank: int) -> list[RankStorage]:
        key = (layout.digest, rank)
        if key not in self._known:
            self._known[key] = rank_storages(layout, rank)
        return self._known[key]


class SourceEnd(Protocol):
    """Where a source rank's values come from."""

    def check(self, plan: Plan, ranks: list[int], version: int) -> list[str]:
        """Hold what is there against the documents; return the names of what is left out.

        Raises WeightsError where something lacks, or is not what the documents say.
        """
        ...

    def source(self, plan: Plan, rank: int, version: int) -> tuple[Source, object]:
        """Return a version's values on a rank, and where they lie: views are good while that is equal."""
        ...

    def truth(self, plan: Plan, version: int) -> Source | None:
        """Return the values of the whole job, found without the plan, where this process can know them."""
        ...


@dataclass(slots=True)
class OriginEnd:
    """A folder or `synthetic`, which every rank can read; `origin_of` names a version's.

    `trust`: the metadata of a DCP folder may be read.
    """

    origin_of: Callable[[int], str]
    allow_extra: bool
    trust: bool = False
    _opened: list[tuple[Plan, object, Source]] = field(default_factory=list, init=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, init=False)

    def check(self, plan: Plan, ranks: list[int], version: int) -> list[str]:
        return self._open(plan, ranks, version)[1]

    def _open(
        self, plan: Plan, ranks: list[int], version: int, casts: tuple[str, ...] = ("sender",)
    ) -> tuple[Source, list[str]]:
        return open_source(
            self.origin_of(version), plan, ranks, version,
            allow_extra=self.allow_extra, trust=self.trust, casts=casts,
        )  # fmt: skip

    def source(self, plan: Plan, rank: int, version: int) -> tuple[Source, object]:
        origin = self.origin_of(version)
        if origin == "synthetic":
            # its values are made when asked for: no view of them is kept
            return self._open(plan, [rank], version)[0], origin
        files = [(path.name, path.stat()) for path in sorted(Path(origin).iterdir())]
        place = (origin, *((name, one.st_ino, one.st_mtime_ns) for name, one in files))
        with self._opening:
            # several jobs take the same version, each by a plan of its own
            self._opened = [one for one in self._opened if one[1] == place][-_KEPT_OPEN:]
            known = next((source for of, _, source in self._opened if of is plan), None)
            if known is None:
                known = self._open(plan, [rank], version)[0]
                self._opened.append((plan, place, known))
        return known, place

    def truth(self, plan: Plan, version: int) -> Source | None:
        ranks = list(range(plan.source.num_ranks))
        return self._open(plan, ranks, version, ("sender", "receiver"))[0]


class LiveSourceEnd:
    """The tensors of a running trainer."""

    def __init__(self, live: LiveTensors, *, allow_extra: bool) -> None:
        self._live, self._allow_extra = live, allow_extra
        self._snapshot: dict[str, Tensor] | None = None
        self._taken: dict[str, Tensor] | None = None
        self._storages = _Storages()
        self._place: object = None
        self._windows = StorageWindows()
        self._binding = threading.Lock()

    def _held(self, plan: Plan, rank: int) -> dict[str, Tensor]:
        live = self._live if self._taken is None else LiveTensors(self._taken)
        who = f"{plan.source.name} {rank}"
        return live.held(who, self._storages.of(plan.source, rank), allow_extra=self._allow_extra)

    def check(self, plan: Plan, ranks: list[int], version: int) -> list[str]:
        held = [self._held(plan, rank) for rank in ranks]
        have = self._live.now() if self._taken is None else self._taken
        return sorted(set(have) - set(held[0])) if held else []

    def take(self, *, copied: bool) -> None:
        """Look the tensors up now, and copy them if asked to; the next refits send these, until `drop`."""
        taken = self._live.now()
        if copied:
            taken = self._snapshot = snapshot(taken, self._snapshot)
        self._taken = taken

    def drop(self) -> None:
        """Send what is live again. The copies' memory is kept for the next ones."""
        self._taken = None

    def source(self, plan: Plan, rank: int, version: int) -> tuple[Source, object]:
        with self._binding:  # several jobs may be refitted at once
            tensors = self._held(plan, rank)
            place = place_of(tensors)
            if place != self._place:
                windows = StorageWindows()
                windows.add(self._storages.of(plan.source, rank), tensors)
                self._place, self._windows = place, windows
            held = self._windows
        made = made_of(plan.pairs, at=["sender"])
        return (QuantisingSource(held, made) if made else held), place

    def truth(self, plan: Plan, version: int) -> Source | None:
        return None


class DestinationEnd(Protocol):
    """Where a destination rank's values go.

    `version` is the one that is wholly there, or None; `torn` says that a refit has begun to write over it.
    """

    version: int | None
    torn: bool

    def check(self, plan: Plan, rank: int) -> None:
        """Hold what is there against the documents. Raises WeightsError where it does not fit."""
        ...

    def begin(self, plan: Plan, rank: int, version: int, device: torch.device) -> tuple[Destination, object]:
        """Return the storages that take a version, and where they lie: views are good while that is equal."""
        ...

    def prepare(self, version: int) -> None:
        """Get ready to apply a version that is all here. Nobody applies it where a rank raises."""
        ...

    def apply(self, version: int) -> None:
        """Make the version the one that is there; every rank has all of it."""
        ...

    def publish(self, *, first: bool) -> None:
        """Let others see the version, which every rank has applied. `first`: on the job's first rank."""
        ...

    def discard(self) -> None:
        """Take away what a failed refit leaves behind."""
        ...


class MemoryEnd:
    """Storages that this process keeps for itself."""

    def __init__(self, *, double_buffer: bool = False) -> None:
        self.version: int | None = None
        self.torn = False
        self._double = double_buffer
        self._kept: list[Destination] = []
        self._filling = False

    def check(self, plan: Plan, rank: int) -> None:
        pass

    def begin(self, plan: Plan, rank: int, version: int, device: torch.device) -> tuple[Destination, object]:
        wanted = 2 if self._double else 1
        if len(self._kept) < wanted:
            self._kept.append(Destination.create(plan, rank, None, version, device))
        else:
            self._kept.append(self._kept.pop(0))
            self._kept[-1].zero_padding()
        self.torn, self._filling = not self._double, True
        return self._kept[-1], id(self._kept[-1])

    @property
    def held(self) -> Destination | None:
        """The storages of the version that is there."""
        if self.version is None or self.torn:
            return None
        return self._kept[-2 if self._filling else -1]

    def prepare(self, version: int) -> None:
        pass

    def apply(self, version: int) -> None:
        self.version, self.torn, self._filling = version, False, False

    def publish(self, *, first: bool) -> None:
        pass

    def discard(self) -> None:
        if self._double and self._filling and self.version is not None:
            self._kept.append(self._kept.pop(0))
        self._filling = False


class FolderEnd:
    """A folder with a file per rank, which gets its name when all files are complete."""

    def __init__(self, folder: PendingFolder) -> None:
        self.version: int | None = None
        self.torn = False
        self._folder = folder
        self._written: Destination | None = None

    def check(self, plan: Plan, rank: int) -> None:
        pass

    def begin(self, plan: Plan, rank: int, version: int, device: torch.device) -> tuple[Destination, object]:
        self._written = Destination.create(plan, rank, self._folder, version, device)
        return self._written, version

    def prepare(self, version: int) -> None:
        pass

    def apply(self, version: int) -> None:
        self.version = version

    def publish(self, *, first: bool) -> None:
        if first:
            self._folder.publish()

    def discard(self) -> None:
        self._folder.discard()


class LiveEnd:
    """The tensors of a running engine: filled in place, or copied from a second set when all of it is there.

    Storages of tensors with `route: broadcast` that the engine does not have by that name are made here, and handed to
    its own loader when every rank has them.
    """

    def __init__(
        self, live: LiveTensors, *, allow_extra: bool, double_buffer: bool = False, hooks: Hooks | None = None
    ) -> None:
        self.version: int | None = None
        self.torn = False
        self._live, self._allow_extra, self._double = live, allow_extra, double_buffer
        self._hooks = hooks or Hooks()
        self._place: tuple[object, ...] | None = None
        self._unshared: tuple[object, ...] | None = None  # a place of which that was found
        self._tensors: dict[str, Tensor] = {}
        self._shadow: Destination | None = None
        self._filled: Destination | None = None
        self._storages = _Storages()
        self._handed: dict[str, Tensor] = {}  # what the engine's own loader takes
        self._who, self._rank = "", 0

    def check(self, plan: Plan, rank: int) -> None:
        held = self._held(plan, rank, self._for_loader(plan, rank))
        place = place_of(held)
        if place != self._unshared:
            own = [one for one in self._storages.of(plan.destination, rank) if one.name in held]
            faults = sharing_faults(own, held)
            if faults:
                raise WeightsError("\n".join(f"{plan.destination.name} {rank}: {one}" for one in faults[:12]))
            self._unshared = place

    def _for_loader(self, plan: Plan, rank: int) -> list[RankStorage]:
        """Return the storages that the engine does not have by name, and that its own loader takes."""
        if self._hooks.load_weights is None:
            return []
        whole = {pair.name for pair in plan.pairs if pair.asked_route == "broadcast"}
        have = self._live.now()
        return [
            one
            for one in self._storages.of(plan.destination, rank)
            if one.name not in have and all(window.tensor in whole for window in one.windows)
        ]

    def _held(self, plan: Plan, rank: int, for_loader: list[RankStorage]) -> dict[str, Tensor]:
        """Return the engine's own tensors, held against the documents."""
        others = {one.name for one in for_loader}
        own = [one for one in self._storages.of(plan.destination, rank) if one.name not in others]
        return self._live.held(f"{plan.destination.name} {rank}", own, allow_extra=self._allow_extra)

    def begin(self, plan: Plan, rank: int, version: int, device: torch.device) -> tuple[Destination, object]:
        storages = self._storages.of(plan.destination, rank)
        self._who, self._rank = f"{plan.destination.name} {rank}", int(plan.topology.destination[rank])
        for_loader = self._for_loader(plan, rank)
        self._handed = {
            one.name: self._handed[one.name]
            if one.name in self._handed
            else torch.zeros(one.shape, dtype=torch_dtype(one.dtype), device=device)
            for one in for_loader
        }
        self._tensors = self._held(plan, rank, for_loader) | self._handed
        if self._double:
            if self._shadow is None:
                self._shadow = Destination.create(plan, rank, None, version, device)
            self._shadow.keep_padding_of(self._tensors)
            return self._shadow, id(self._shadow)
        self._call("before", self._hooks.before, version)
        self._settle()
        self.torn = True
        place = place_of(self._tensors)
        if self._filled is None or place != self._place:
            self._filled = Destination.over(plan, storages, self._tensors, device)
        self._place = place
        self._filled.zero_padding()
        return self._filled, place

    def prepare(self, version: int) -> None:
        if self._shadow is not None:
            self._call("before", self._hooks.before, version)

    def apply(self, version: int) -> None:
        if self._shadow is not None:
            self.torn = True
            self._settle()  # the engine's own streams may still read the old version, and are next to read the new one
            self._shadow.copy_into(self._tensors)
            self._settle()
        if self._handed:
            self._call("load_weights", self._hand_over, version)
        self.version, self.torn = version, False

    def _settle(self) -> None:
        for device in {one.device for one in self._tensors.values()}:
            settle(device)

    def _hand_over(self, _: int) -> None:
        assert self._hooks.load_weights is not None
        self._hooks.load_weights(iter(self._handed.items()))

    def _call(self, name: str, hook: Callable[[int], object] | None, version: int) -> None:
        if hook is None:
            return
        try:
            hook(version)
        except Exception as error:
            raise TransferError(
                f"{self._who}: its hook `{name}` raised {type(error).__name__} at version {version}: {error}",
                self._rank,
            ) from error

    def publish(self, *, first: bool) -> None:
        assert self.version is not None
        self._call("after", self._hooks.after, self.version)

    def discard(self) -> None:
        pass
