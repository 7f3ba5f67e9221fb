"""Hardware profiles: the rates and latencies that predictions are made from, as YAML documents."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from pydantic import Field

from reshard_cli.errors import DocumentError
from reshard_cli.spec.checking import StrictDocument, read_document

__all__ = ["Hardware", "hardware_names", "hardware_text", "read_hardware"]

_LARGE_DOMAIN = 16  # ranks in a domain from which it is a rack and no node


class Hardware(StrictDocument):
    """One kind of machine. Rates in bytes per second, per rank and direction; latencies in seconds."""

    name: str = Field(min_length=1)
    nic: float = Field(gt=0, description="line rate of a rank's NIC: the bound is taken from it")
    nic_achieved: float = Field(gt=0, description="what transfers reach of it")
    nvlink: float = Field(gt=0, description="rate inside a domain")
    memory: float = Field(gt=0, description="rate of copies in memory, reads and writes together")
    launch: float = Field(ge=0, description="one grouped launch: what a round costs before its first byte")
    message: float = Field(ge=0, description="one more message in a group")
    tensor: float = Field(ge=0, description="one tensor in gather-and-broadcast systems")


def hardware_names() -> list[str]:
    """Return the names of the profiles that are shipped."""
    folder = resources.files("reshard_cli.spec") / "hardware"
    return sorted(one.name.removesuffix(".yaml") for one in folder.iterdir() if one.name.endswith(".yaml"))


def hardware_text(name: str) -> str:
    """Return a shipped profile's file."""
    return (resources.files("reshard_cli.spec") / "hardware" / f"{name}.yaml").read_text(encoding="utf-8")


def read_hardware(name: str | None, largest_domain: int) -> Hardware:
    """Return the profile of this name or file; without one, by the size of the largest domain.

    Raises DocumentError for a name that is neither, or a wrong document.
    """
    if name is None:
        name = "gb200-nvl72" if largest_domain > _LARGE_DOMAIN else "dgx-h100"
    if name in hardware_names():
        path = Path(str(resources.files("reshard_cli.spec") / "hardware" / f"{name}.yaml"))
    else:
        path = Path(name)
        if not path.is_file():
            known = ", ".join(hardware_names())
            raise DocumentError(f"--hardware: {name!r} is neither a file nor one of: {known}, cpu")
    hardware, _, problems = read_document(path, Hardware)
    if problems:
        raise DocumentError(problems=problems)
    return hardware
