"""What a document has its tensors cast to, and the block scales that belong to some of them."""

from __future__ import annotations

from collections.abc import Callable

from reshard_cli.spec.casts import SCALE_SUFFIX, Blockwise, block_of, parse_cast, scale_shape, weight_of_scale
from reshard_cli.spec.layout_document import LoadedLayout
from reshard_cli.spec.located import KeyPath
from reshard_cli.spec.model import LogicalTensor
from reshard_cli.spec.names import fill

__all__ = ["Casts"]


class Casts:
    """The casts of one document. `scales`: by name of the scales, their tensor and its block size."""

    def __init__(
        self,
        loaded: LoadedLayout,
        rule_of: Callable[[LogicalTensor], int | None],
        add: Callable[[KeyPath, str, str], None],
    ) -> None:
        """`rule_of` gives a tensor's rule, `add` notes a problem: path, kind, message."""
        self._loaded, self._document = loaded, loaded.document
        self._rule_of, self._add = rule_of, add
        self._any = bool(loaded.casts) or any(rule.cast for rule in loaded.document.tensors)
        self.scales: dict[str, tuple[str, int]] = {}
        self.blocks: dict[str, int] = {}

    def asked_dtype(self, tensor: LogicalTensor, rule: int | None) -> str | None:
        """Return the dtype that the document itself gives the tensor."""
        cast = self.cast_of(tensor)
        if cast is not None:
            return cast[0].dtype if isinstance(cast[0], Blockwise) else cast[0]
        own = None if rule is None else self._document.tensors[rule].dtype
        return own or self._document.dtype

    def cast_of(self, tensor: LogicalTensor) -> tuple[str | Blockwise, KeyPath] | None:
        """Return what the document has the tensor cast to, and where it says so."""
        if not self._any:
            return None
        probe = fill(tensor.name, expert=0)
        for index, (pattern, cast) in enumerate(self._loaded.casts):
            if pattern.matches(probe):
                return cast, ("casts", index, "cast")
        rule = self._rule_of(tensor)
        text = None if rule is None else self._document.tensors[rule].cast
        return None if text is None else (parse_cast(text), ("tensors", rule or 0, "cast"))

    def with_scales(self, tensors: list[tuple[LogicalTensor, str]]) -> list[tuple[LogicalTensor, str]]:
        """Return the tensors with the scales that casts add, each after its own; notes which belong to which."""
        found = []
        known = {tensor.name: tensor for tensor, _ in tensors}
        for tensor, logical in tensors:
            found.append((tensor, logical))
            if weight_of_scale(tensor.name) in known:
                continue  # a pattern for weights may fit the names of their scales too
            asked = self.cast_of(tensor)
            cast = asked[0] if asked is not None and isinstance(asked[0], Blockwise) else None
            scale = known.get(tensor.name + SCALE_SUFFIX)
            if scale is not None and tensor.dtype.startswith("float8"):
                size = block_of(tensor.shape, scale.shape)
                if size is not None:
                    self.scales[scale.name] = (tensor.name, size)
                if asked is not None and cast is not None and cast != Blockwise(tensor.dtype, size or 0):
                    told = f"{tensor.name!r} is {tensor.dtype} with scales {list(scale.shape)} already"
                    self._add(asked[1], "scaled", told)
            elif asked is not None and cast is not None and self._can_scale(tensor, logical, scale, asked[1]):
                shape = scale_shape(tensor.shape, cast.size)
                name = tensor.name + SCALE_SUFFIX
                scales = LogicalTensor(name, shape, "float32", tensor.layer, tensor.has_experts)
                found.append((scales, name))
                self.scales[name] = (tensor.name, cast.size)
                self._check_no_rule(scales, tensor)
        self.blocks = dict(self.scales.values())
        return found

    def _can_scale(
        self, tensor: LogicalTensor, logical: str, scale: LogicalTensor | None, where: KeyPath
    ) -> bool:
        if len(tensor.shape) - tensor.has_experts < 2:
            self._add(where, "dims", f"{tensor.name!r} has fewer than two dims, and so no blocks")
        elif tensor.name != logical or logical in self._document.alias.values():
            self._add(
                where, "tied", f"{tensor.name!r} is tied to another tensor, and cannot be cast in blocks"
            )
        elif scale is not None:
            self._add(where, "scaled", f"the model has a tensor {scale.name!r} already")
        elif tensor.dtype not in ("bfloat16", "float32", "float16"):
            self._add(where, "dtype", f"{tensor.name!r} is {tensor.dtype}, which has no block scales to find")
        else:
            return True
        return False

    def _check_no_rule(self, scales: LogicalTensor, tensor: LogicalTensor) -> None:
        """Note a rule written for scales that a cast makes: whoever casts finds them where the values are."""
        index = self._rule_of(scales)
        if index is not None and SCALE_SUFFIX in self._document.tensors[index].match:
            told = (
                f"{scales.name!r} are the scales that the cast of {tensor.name!r} makes, and are cut as it is; "
                "leave them out of this rule"
            )
            self._add(("tensors", index, "match"), "scales", told)

    def follows(self, tensor: LogicalTensor) -> str | None:
        """Return the tensor whose scales these are, unless a rule for the scales themselves places them."""
        if tensor.name not in self.scales:
            return None
        index = self._rule_of(tensor)
        if index is not None and SCALE_SUFFIX in self._document.tensors[index].match:
            return None
        return self.scales[tensor.name][0]
