"""What Megatron-core needs to run on a CPU: stand-ins for CUDA, for the Transformer Engine, and for kernels.

Megatron's own code decides everything that a layout is about: which layers there are, what their parameters are
called, which norm goes into which linear layer, how a weight is cut, and what each row of it means. The stand-ins
only compute: the Transformer Engine's layers are Megatron's own parallel linears with its names, and kernels are
written out as loops. `install` comes before any other import of Megatron.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RootMeanSquareNorm(nn.Module):
    """The Transformer Engine's RMSNorm: with a zero-centred gamma, the weight's values lie around 0."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps = eps
        self.zero_centred = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        return root_mean_square(x, self.weight, self.eps, self.zero_centred)


def root_mean_square(x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
    return F.rms_norm(x, weight.shape, weight + 1 if zero_centred else weight, eps)


class WholeLinear(nn.Module):
    """A linear layer that every rank holds whole."""

    def __init__(self, input_size: int, output_size: int, *, parallel_mode: str, **_: Any) -> None:
        super().__init__()
        assert parallel_mode == "duplicated"
        self.weight = nn.Parameter(torch.empty(output_size, input_size))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class GroupedLinear(nn.Module):
    """The linear layers of a rank's experts, one weight each: `weight0`, `weight1`, ..."""

    cut = 0  # the dim that expert tensor parallelism cuts

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        shape = [output_size, input_size]
        shape[self.cut] //= pg_collection.expt_tp.size()
        for index in range(num_gemms):
            self.register_parameter(f"weight{index}", nn.Parameter(torch.empty(shape)))

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        parts = torch.split(x, tokens_per_expert)
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]), None


class RowGroupedLinear(GroupedLinear):
    """The same, cut by columns; the token dispatcher adds the partial sums."""

    cut = 1


class GatedNorm(nn.Module):
    """Mamba-2's norm of what its gate lets through, group by group."""

    def __init__(self, hidden_size: int, eps: float, group_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        groups = (x * F.silu(z)).unflatten(-1, (-1, self.group_size))
        return F.rms_norm(groups, (self.group_size,), None, self.eps).flatten(-2) * self.weight


def state_space_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, _: int, *, D: Tensor, dt_bias: Tensor, **__: Any
) -> Tensor:
    """Mamba-2's recurrence, token by token. x: [batch, token, head, p]; b, c: [batch, token, group, n]."""
    step = F.softplus(dt + dt_bias)
    heads = x.shape[2] // b.shape[2]
    b, c = b.repeat_interleave(heads, 2), c.repeat_interleave(heads, 2)
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], b.shape[-1])
    out = []
    for t in range(x.shape[1]):
        decay = torch.exp(step[:, t] * a)[..., None, None]
        state = state * decay + (step[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None, :]
        out.append((state * c[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, 1)


def unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def module(name: str, **members: Any) -> None:
    """Make a module importable that is not there, or cannot be imported here."""
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(members)


@contextlib.contextmanager
def no_fork(*_: Any) -> Iterator[None]:
    yield


def install() -> None:
    """Make Megatron-core importable and runnable on a CPU, with its Transformer Engine layer specs."""
    torch.cuda.current_device = lambda: "cpu"
    Tensor.cuda = lambda self, *_, **__: self
    module("fla.modules.l2norm", l2norm=unit_length)
    module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=None)  # Megatron has one in torch
    module("mamba_ssm.ops.triton.selective_state_update", selective_state_update=None)
    module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GatedNorm)
    module(
        "mamba_ssm.ops.triton.ssd_combined",
        mamba_chunk_scan_combined=state_space_scan,
        mamba_split_conv1d_scan_combined=None,
    )
    # kernels that only its inference uses
    module(
        "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
        tensor_get_slice_after=None,
        tensor_masked_update=None,
        tensor_merge=None,
    )
    from megatron.core.extensions import transformer_engine as extension
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    CudaRNGStatesTracker.fork = no_fork

    class NormedColumnParallelLinear(ColumnParallelLinear):
        """A column-parallel linear layer with the norm of its input, as the Transformer Engine fuses them."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
            super().__init__(input_size, output_size, config=config, **more)
            self.layer_norm_weight = nn.Parameter(torch.empty(input_size))

        def forward(self, x: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
            config = self.config
            weight, zero_centred = self.layer_norm_weight, config.layernorm_zero_centered_gamma
            return super().forward(
                root_mean_square(x, weight, config.layernorm_epsilon, zero_centred), *more, **named
            )

    class Attention(DotProductAttention):
        """Megatron's own attention, which takes the sizes of a head from what it gets."""

        def __init__(self, *, k_channels: Any = None, v_channels: Any = None, **more: Any) -> None:
            super().__init__(**more)

    layers = {
        "TENorm": RootMeanSquareNorm,
        "TELinear": WholeLinear,
        "TEColumnParallelLinear": ColumnParallelLinear,
        "TERowParallelLinear": RowParallelLinear,
        "TELayerNormColumnParallelLinear": NormedColumnParallelLinear,
        "TEColumnParallelGroupedLinear": GroupedLinear,
        "TERowParallelGroupedLinear": RowGroupedLinear,
        "TEDotProductAttention": Attention,
    }
    for loaded in [extension, *[one for name, one in sys.modules.items() if name.startswith("megatron.")]]:
        for name, layer in layers.items():
            if hasattr(loaded, name):
                setattr(loaded, name, layer)
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs
    from megatron.core.transformer.moe import moe_layer, moe_utils

    moe_utils.te_general_gemm = None  # it then multiplies in torch
    provider.is_te_min_version = lambda *_, **__: True
    for specs in (gpt_layer_specs, experimental_attention_variant_module_specs):
        specs.TESpecProvider = provider.TESpecProvider
        specs.TENorm = RootMeanSquareNorm
    moe_layer.HAVE_TE = True
    moe_layer.TELinear = WholeLinear
