"""Removes an emulated cluster's network namespaces, also after its maker was killed.

The maker starts this file as a program of its own (the standard library is all it needs, so it starts in
no time): it waits until its maker says so or is gone, and then removes what bears the cluster's prefix.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

__all__ = ["NAMESPACES", "find_tool", "namespace_names", "remove_namespaces"]

NAMESPACES = Path("/run/netns")  # where iproute2 keeps the names of network namespaces
_POLL = 0.2
_SETTLE = 0.5  # seconds in which a program that the maker had started may still make a namespace


def find_tool(name: str) -> str | None:
    """Return the path of `ip` or `tc`, also where /usr/sbin is not in PATH, or None."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


def namespace_names(prefix: str) -> list[str]:
    """Return the named network namespaces of this machine whose names start so."""
    if not NAMESPACES.is_dir():
        return []
    return sorted(path.name for path in NAMESPACES.iterdir() if path.name.startswith(prefix))


def remove_namespaces(prefix: str, spare: Collection[int] = ()) -> None:
    """End the programs inside the namespaces with this prefix, all but `spare`, and remove the namespaces.

    Raises OSError where one of them cannot be removed.
    """
    tool = find_tool("ip") or "ip"
    names = namespace_names(prefix)
    for name in names:
        inside = subprocess.run([tool, "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in map(int, inside.stdout.split()):
            if pid not in spare:
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    os.kill(pid, signal.SIGKILL)
    for name in names:
        done = subprocess.run([tool, "netns", "del", name], capture_output=True, text=True, check=False)
        if done.returncode and (NAMESPACES / name).exists():  # else somebody else has removed it meanwhile
            raise OSError(f"ip netns del {name}: {done.stderr.strip()}")


def _main(prefix: str, maker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # ranks that outlive the maker hold its end of the pipe too: so the parent is looked at as well
    while os.getppid() == maker and not select.select([sys.stdin], [], [], _POLL)[0]:
        pass
    told = os.getppid() == maker and sys.stdin.read(1) != ""
    remove_namespaces(prefix, [maker] if told else [])
    if not told:
        time.sleep(_SETTLE)
        remove_namespaces(prefix)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
