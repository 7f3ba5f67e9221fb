"""Which pipeline stages hold a layer, or a tensor that belongs to none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reshard_cli.errors import DocumentError
from reshard_cli.layout.boxes import Ints
from reshard_cli.spec.layout_document import LoadedLayout
from reshard_cli.spec.model import Model
from reshard_cli.spec.names import Pattern
from reshard_cli.spec.placement import Stage

__all__ = ["Stages"]


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of one job. `bounds`: stage s holds the layers bounds[s] to bounds[s+1]-1; [0] without."""

    bounds: Ints
    first: tuple[Pattern, ...] = ()
    last: tuple[Pattern, ...] = ()

    @classmethod
    def of(cls, loaded: LoadedLayout, model: Model) -> Stages:
        """Return the stages of the document for this model. Raises DocumentError where they do not fit."""
        pipeline = loaded.document.pipeline
        if pipeline is None:
            return cls(np.zeros(1, np.int64))
        num_layers = max((t.layer + 1 for t in model.tensors if t.layer is not None), default=0)
        counts = pipeline.layers
        if counts is None:
            size = _stage_axis(loaded)
            if num_layers % size:
                message = f"{num_layers} layers do not split evenly over {size} stages; write pipeline.layers"
                raise DocumentError(problems=[loaded.located.problem(("pipeline",), message)])
            counts = [num_layers // size] * size
        if sum(counts) != num_layers:
            message = f"the stages hold {sum(counts)} layers in all, the model has {num_layers}"
            raise DocumentError(problems=[loaded.located.problem(("pipeline", "layers"), message)])
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        return cls(
            bounds,
            tuple(Pattern(text) for text in pipeline.first),
            tuple(Pattern(text) for text in pipeline.last),
        )

    @property
    def num_stages(self) -> int:
        """The number of stages; 1 without a pipeline."""
        return max(1, len(self.bounds) - 1)

    def of_tensor(self, name: str, layer: int | None) -> frozenset[int]:
        """Return the stages that hold this tensor; empty where the document does not say."""
        if layer is not None:
            stage = int(np.searchsorted(self.bounds, layer, side="right")) - 1
            return frozenset([stage]) if stage < self.num_stages else frozenset()
        stages = set()
        if any(pattern.matches(name) for pattern in self.first):
            stages.add(0)
        if any(pattern.matches(name) for pattern in self.last):
            stages.add(self.num_stages - 1)
        return frozenset(stages)

    def local_layer(self, layer: int) -> int:
        """Return the layer's number inside its stage, counted from 0."""
        stage = int(np.searchsorted(self.bounds, layer, side="right")) - 1
        return layer - int(self.bounds[min(stage, self.num_stages - 1)])


def _stage_axis(loaded: LoadedLayout) -> int:
    for index, place in enumerate(loaded.places):
        for axis, placement in place.items():
            if isinstance(placement, Stage):
                return loaded.meshes[loaded.mesh_of(index)][axis]
    return 1
