"""reshard-cli gives inference jobs their new weights: exact, close to the network's limit, never hanging.

As a library: `join` the other job, `Session.bind` tensors, `Session.refit`. `Layout.of` describes a live model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard_cli.errors import DocumentError, ReshardError, TransferError, VerifyError, WeightsError

if TYPE_CHECKING:
    from reshard_cli.refit.library import Handle, Session, join
    from reshard_cli.weights.live_layout import Layout

__all__ = [
    "DocumentError",
    "Handle",
    "Layout",
    "ReshardError",
    "Session",
    "TransferError",
    "VerifyError",
    "WeightsError",
    "__version__",
    "join",
]

__version__ = "0.1.0"

_LATER = {
    "join": "refit.library",
    "Session": "refit.library",
    "Handle": "refit.library",
    "Layout": "weights.live_layout",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import, and the command line does without it where it can
    if name in _LATER:
        import importlib

        return getattr(importlib.import_module(f"reshard_cli.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
