"""What a report says about where it ran, which machine or NVLink fabric a rank is on, and which device it has."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
from typing import Any

import numpy as np
import torch

from reshard_cli import __version__

__all__ = ["describe_environment", "fabric_of", "machine_place", "own_device"]

_SHOWN = ("NCCL_", "TORCH_NCCL_", "GLOO_")


def describe_environment(backend: str) -> dict[str, Any]:
    """Return versions, machine, and the transport's settings that are in the environment."""
    found: dict[str, Any] = {
        "reshard_cli": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "settings": {key: value for key, value in sorted(os.environ.items()) if key.startswith(_SHOWN)},
    }
    if backend == "nccl":
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        found["gpu"] = torch.cuda.get_device_name()
    return found


def own_device(setup: dict[str, Any]) -> torch.device:
    """Return this rank's device, and make a GPU the current one: of those that the process sees, perhaps only one."""
    if setup["backend"] != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", setup["local_rank"] % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def machine_place(local_rank: int) -> str:
    """Return a name that ranks joined by NVLink share: their fabric's, else their host's."""
    if torch.cuda.is_available() and shutil.which("nvidia-smi"):
        text = subprocess.run(
            ["nvidia-smi", "-q", "-i", str(local_rank)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        ).stdout
        fabric = fabric_of(text)
        if fabric is not None:
            return fabric
    return socket.gethostname()


def fabric_of(text: str) -> str | None:
    """Return the NVLink fabric (cluster and clique) that `nvidia-smi -q` shows, or None without one."""
    values = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("CliqueId", "ClusterUUID"):
            values[key.strip()] = value.strip()
    cluster = values.get("ClusterUUID", "N/A")
    if cluster == "N/A" or not cluster.replace("-", "").strip("0"):
        return None
    return f"fabric {cluster}/{values.get('CliqueId', '0')}"
