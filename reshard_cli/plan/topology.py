"""Where the ranks of the two jobs are: their numbers in the joint world, and their NVLink domains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reshard_cli.errors import DocumentError
from reshard_cli.layout.boxes import Ints

__all__ = ["Topology"]


@dataclass(frozen=True, slots=True)
class Topology:
    """source, destination: the world rank of each job rank; domain: the domain of each world rank."""

    source: Ints
    destination: Ints
    domain: Ints

    @classmethod
    def of_jobs(
        cls,
        source_ranks: int,
        destination_ranks: int,
        source_domain: int,
        destination_domain: int,
        *,
        colocated: bool = False,
    ) -> Topology:
        """Return the topology of two jobs whose domains are consecutive ranks of each job.

        Raises DocumentError where colocated jobs, which share their GPUs, disagree on the domain.
        """
        source = np.arange(source_ranks, dtype=np.int64)
        if colocated:
            if source_domain != destination_domain:
                raise DocumentError(
                    f"colocated jobs share their GPUs, but the source says domain: {source_domain} and the "
                    f"destination domain: {destination_domain}; make them equal, or give --domain"
                )
            world = np.arange(max(source_ranks, destination_ranks), dtype=np.int64)
            return cls(source, np.arange(destination_ranks, dtype=np.int64), world // source_domain)
        destination = source_ranks + np.arange(destination_ranks, dtype=np.int64)
        first = -(-source_ranks // source_domain)
        domains = [source // source_domain, first + (destination - source_ranks) // destination_domain]
        return cls(source, destination, np.concatenate(domains))

    @classmethod
    def of_machine(
        cls, source_ranks: int, destination_ranks: int, places: Sequence[str], *, colocated: bool
    ) -> Topology:
        """Return the topology where `places` names each world rank's host or NVLink fabric."""
        source = np.arange(source_ranks, dtype=np.int64)
        destination = np.arange(destination_ranks, dtype=np.int64) + (0 if colocated else source_ranks)
        numbers: dict[str, int] = {}
        domain = [numbers.setdefault(place, len(numbers)) for place in places]
        return cls(source, destination, np.array(domain, np.int64))

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the joint world."""
        return len(self.domain)

    @property
    def colocated(self) -> bool:
        """Whether the two jobs share ranks."""
        return bool(np.intersect1d(self.source, self.destination).size)

    def rails(self) -> Ints:
        """Return each rank's index inside its domain: ranks with the same one share a network rail."""
        order = np.argsort(self.domain, kind="stable")
        ordered = self.domain[order]
        starts = np.concatenate([[True], ordered[1:] != ordered[:-1]])
        first = np.maximum.accumulate(np.where(starts, np.arange(len(ordered)), 0))
        rails = np.empty(len(ordered), np.int64)
        rails[order] = np.arange(len(ordered)) - first
        return rails
