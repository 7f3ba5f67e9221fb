"""The tensors of a running job, by storage name, as its engine holds them now.

They are looked up again at every refit, because an engine may have bound a name to another tensor since. What is
found is held against the layout: a tensor that is missing, or that no document speaks of, would serve old weights.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reshard_cli.errors import DocumentError, WeightsError, listed
from reshard_cli.layout.storage import RankStorage
from reshard_cli.spec.names import normalise
from reshard_cli.weights.sharing import memory_fault

__all__ = ["Bindable", "Hooks", "LiveEndpoint", "LiveTensors", "place_of", "snapshot"]

Bindable = torch.nn.Module | Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]]


class LiveTensors:
    """A model, a mapping of tensors, or a function that returns one; asked anew each time."""

    def __init__(self, given: Bindable | None) -> None:
        """None: something is bound later."""
        self._given = given

    def bind(self, given: Bindable) -> None:
        """Ask this one from now on."""
        self._given = given

    def now(self) -> dict[str, Tensor]:
        """Return this rank's tensors: of a DTensor, the local part. Raises WeightsError."""
        given: Any = self._given
        if given is None:
            raise WeightsError("live tensors: nothing is bound; call bind() before the first refit")
        if isinstance(given, torch.nn.Module):
            given = given.state_dict(keep_vars=True)
        elif not isinstance(given, Mapping) and callable(given):
            given = given()
        if not isinstance(given, Mapping):
            raise WeightsError(f"live tensors: {type(given).__name__} is no mapping from names to tensors")
        found: dict[str, Tensor] = {}
        for name, value in given.items():
            if not isinstance(value, Tensor):
                continue  # a state_dict may also carry an engine's extra state
            plain = normalise(str(name))
            if plain in found:
                raise WeightsError(f"live tensors: two are named {plain!r} once prefixes are taken off")
            found[plain] = _local(plain, value)
        return found

    def held(self, who: str, storages: Sequence[RankStorage], *, allow_extra: bool) -> dict[str, Tensor]:
        """Return the tensors of these storages, as they are now.

        `who` names the rank for messages. Raises WeightsError with everything that does not fit.
        """
        have = self.now()
        lines = []
        missing = [one.name for one in storages if one.name not in have]
        extra = sorted(set(have) - {one.name for one in storages})
        if missing:
            lines.append(f"{who}: the live tensors lack {listed(missing)}")
        if extra and (missing or not allow_extra):
            mend = "" if missing else " (--allow-extra leaves them as they are)"
            lines.append(f"{who}: the documents do not speak of {listed(extra)}, which are there{mend}")
        for storage in storages:
            tensor = have.get(storage.name)
            if tensor is None:
                continue
            real = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            if real != (storage.dtype, list(storage.shape)):
                lines.append(
                    f"{who}: live tensor {storage.name!r} is {real[0]}{real[1]}, "
                    f"the document says {storage.dtype}{list(storage.shape)}"
                )
            elif (fault := memory_fault(tensor)) is not None:
                lines.append(f"{who}: live tensor {storage.name!r} {fault}")
        if lines:
            more = [f"… and {len(lines) - 12} more lines"] if len(lines) > 12 else []
            raise WeightsError("\n".join(lines[:12] + more))
        return {one.name: have[one.name] for one in storages}


def _local(name: str, value: Tensor) -> Tensor:
    tensor: Tensor = value
    if hasattr(value, "to_local"):
        if any(placement.is_partial() for placement in value.placements):  # type: ignore[attr-defined]
            raise WeightsError(
                f"live tensor {name!r} is a sum that is not made yet (Partial): redistribute it first"
            )
        tensor = value.to_local()
        if hasattr(tensor, "wait"):
            tensor = tensor.wait()
    return tensor.detach()


def place_of(tensors: Mapping[str, Tensor]) -> tuple[object, ...]:
    """Return what changes when one of these tensors was bound to other memory."""
    return tuple(
        (name, one.data_ptr(), tuple(one.shape), one.stride(), one.dtype) for name, one in tensors.items()
    )


def snapshot(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return copies of tensors, in the memory of an earlier snapshot where it fits. Raises WeightsError."""
    copies = {}
    for name, tensor in tensors.items():
        fault = memory_fault(tensor)
        if fault is not None:
            raise WeightsError(f"live tensor {name!r} {fault}")
        known = None if into is None else into.get(name)
        wanted = (tensor.shape, tensor.dtype, tensor.device)
        if known is None or (known.shape, known.dtype, known.device) != wanted:
            known = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        with torch.inference_mode():  # where tensors may be written that were made under it
            known.copy_(tensor)
        copies[name] = known
    return copies


@dataclass(slots=True)
class Hooks:
    """What an engine does just before its tensors are written, and when all is there; both get the version.

    `load_weights` is the engine's own loader, for values that it has to change: it gets (name, tensor) pairs.
    """

    before: Callable[[int], object] | None = None
    after: Callable[[int], object] | None = None
    load_weights: Callable[[Iterator[tuple[str, Tensor]]], object] | None = None


@dataclass(slots=True)
class LiveEndpoint:
    """What `live:package.module:function` names: a model, a mapping, or an object of the user's.

    The object has `state_dict()` (or is a mapping, or has `tensors`), and may have `step()`, which a loop calls
    between refits, the hooks (`before`, `after`, `load_weights`) that a destination calls, and `close()`.
    """

    given: Any
    tensors: LiveTensors
    hooks: Hooks

    @classmethod
    def load(cls, text: str, flag: str) -> LiveEndpoint:
        """Return what the function returns. Raises DocumentError where there is none, or it has no tensors."""
        given = _called(text, flag)
        if isinstance(given, (torch.nn.Module, Mapping)):
            tensors = LiveTensors(given)
        elif callable(getattr(given, "state_dict", None)):
            tensors = LiveTensors(given.state_dict)
        elif hasattr(given, "tensors"):
            tensors = LiveTensors(given.tensors)
        else:
            raise DocumentError(
                f"{flag}: {text} returned {type(given).__name__}: it has neither `state_dict()` nor `tensors`"
            )
        return cls(given, tensors, _hooks_of(given))

    def step(self) -> None:
        """Let it do what it does between refits: train, or generate."""
        self._call("step")

    def close(self) -> None:
        """Let it end."""
        self._call("close")

    def _call(self, name: str) -> None:
        method = None if isinstance(self.given, Mapping) else getattr(self.given, name, None)
        if callable(method):
            method()


def _hooks_of(given: Any) -> Hooks:
    if isinstance(given, (torch.nn.Module, Mapping)):
        return Hooks()  # a model's own methods of these names are something else
    return Hooks(*(getattr(given, name, None) for name in ("before", "after", "load_weights")))


def _called(text: str, flag: str) -> Any:
    module, _, function = text.removeprefix("live:").partition(":")
    if not module or not function:
        raise DocumentError(f"{flag}: {text!r} is not live:package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # as `python -m` has it
    try:
        found = getattr(importlib.import_module(module), function)
    except ImportError as error:
        raise DocumentError(f"{flag}: {module}: cannot be imported: {error}") from error
    except AttributeError as error:
        raise DocumentError(f"{flag}: module {module} has no {function!r}") from error
    if not callable(found):
        raise DocumentError(f"{flag}: {module}:{function} is no function")
    return found()
