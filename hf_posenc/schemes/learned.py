"""Learned: a trained table of positions, added to the hidden states."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..core.dims import Dims
from ..core.dtypes import geometric_frequencies, sinusoids
from ..core.modules import Native, PositionEmbedding, parameter
from ..core.positions import require_whole
from ..core.registry import register_scheme
from .base import EmbeddingScheme, init

Initialization = Literal["native", "sinusoidal", "normal"]

HIERARCHY = 0.4
"""Su's alpha: the share of the coarse part in a position's vector. With 0.5, positions i n + j and j n + i
would get the same vector."""


@register_scheme
@dataclass(frozen=True, kw_only=True)
class Learned(EmbeddingScheme):
    """A trained table of position vectors, added to the hidden states.

    Equation: `h_t = x_t + P[t]` (Gehring et al. 2017, arXiv:1705.03122, section 3.1; GPT-2).
    Beyond the training length: nothing; a position past the table raises ValueError.
    Deviations: none. A table that starts from the base's and is longer continues it by Su Jianlin's decomposition,
    2020, spaces.ac.cn/archives/7947: `P[i n + j] = a u_i + (1 - a) u_j`, `u_i = (p_i - a p_0) / (1 - a)`, `a = 0.4`,
    with `p_i` the rows of the trained table. It reaches from n positions to n^2 and leaves the first n unchanged.
    Source: Gehring et al. 2017, arXiv:1705.03122; Radford et al. 2019 (GPT-2).

    Args:
        num_positions: rows of the table; None means those of the base's table, or the length in its config.
        placement: add to the `input`, or before `every_layer`.
        share_layers: with `every_layer`, one table for all layers or one per layer.
        initialization: `native` (keep the base's table, and continue it if it is too short), `sinusoidal` (with the RMS
            of the base's table, or of its token embeddings), `normal` (standard deviation 0.02). None means `native`,
            and `sinusoidal` where the base has no table.
    """

    name: ClassVar[str] = "learned"
    num_positions: int | None = None
    placement: Literal["input", "every_layer"] = "input"
    share_layers: bool = True
    initialization: Initialization | None = None

    def __post_init__(self) -> None:
        if self.num_positions is not None:
            self.positive("num_positions", int)
        self.one_of("placement", ("input", "every_layer"))
        self.flags("share_layers")
        if self.initialization is not None:
            self.one_of("initialization", get_args(Initialization))

    @property
    def limit(self) -> int | None:
        """Rows of the table."""
        return self.num_positions

    @property
    def every_layer(self) -> bool:
        return self.placement == "every_layer"

    def resolve(self, native: Native, dims: Dims) -> EmbeddingScheme:
        """Return the scheme with `num_positions` and `initialization` chosen; ValueError if the base forbids them."""
        if self.placement == "input" and not self.share_layers:
            raise ValueError(
                "learned: share_layers=False is for placement='every_layer': there is one table at the input"
            )
        rows = 0 if native.table is None else native.table.shape[0]
        wanted = self.num_positions or rows or native.max_positions
        if wanted is None:
            raise ValueError(
                "learned: give num_positions, since the base's config does not say at which length it was trained"
            )
        choice = self.initialization or ("native" if rows else "sinusoidal")
        if choice == "native" and rows == 0:
            raise ValueError(
                "learned: initialization='native' starts from the base's table of positions, and this base has none; "
                "choose sinusoidal or normal"
            )
        if choice == "native" and wanted > rows**2:
            raise ValueError(f"learned: a hierarchy of {rows} positions reaches {rows**2}, not {wanted}")
        return replace(self, num_positions=wanted, initialization=choice)

    def build(self, dims: Dims) -> PositionEmbedding:
        return Table(self, dims.hidden_size)


class Table(PositionEmbedding):
    """The module of `learned`, with the parameter `table` (num_positions, E)."""

    def __init__(self, scheme: Learned, size: int) -> None:
        """Make the table.

        Args:
            scheme: the resolved scheme.
            size: E.
        """
        super().__init__()
        if scheme.num_positions is None:
            raise ValueError("learned: num_positions has not been decided")
        self.initialization = scheme.initialization
        self.table = parameter(scheme.num_positions, size)

    def reset_parameters(self) -> None:
        """Start at random, as transformers starts embeddings, if no checkpoint has the table."""
        init.normal_(self.table, std=0.02)

    def initialize(self, native: Native) -> None:
        """Start as `initialization` says, as a rule from the base's table."""
        if self.initialization == "normal":
            self.reset_parameters()
        else:
            init.copy_(self.table, self.start(native).to(self.table))

    def start(self, native: Native) -> Tensor:
        """Return the values from which the table starts, (num_positions, E)."""
        count, size = self.table.shape
        if self.initialization == "sinusoidal" or native.table is None:
            device = self.table.device
            waves = sinusoids(torch.arange(count, device=device), geometric_frequencies(size, 10000.0, device))
            # sines and cosines have an RMS of 1 / sqrt(2)
            return torch.stack(waves, -1).flatten(-2)[:, :size] * (native.rms * 2**0.5)
        return hierarchical(native.table, count)

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return rows of the table, (B|1, T, E).

        A position past the table's end raises ValueError, or in compiled code the device's index error.
        """
        rows = self.table.shape[0]
        require_whole(position_ids, "a learned table")
        if not torch.compiler.is_compiling() and position_ids.numel():
            last = int(position_ids.max())
            if last >= rows:
                raise ValueError(
                    f"position {last} is past the learned table of {rows} positions; patch with "
                    f"num_positions={last + 1} or more, or with a scheme without a limit"
                )
        return torch.nn.functional.embedding(position_ids, self.table)


def hierarchical(table: Tensor, count: int) -> Tensor:
    """Continue a table (n, E) to (count, E), count <= n^2, by Su's decomposition; the first n rows stay the same."""
    n = table.shape[0]
    basis = (table.double() - HIERARCHY * table[:1].double()) / (1 - HIERARCHY)
    index = torch.arange(count, device=table.device)
    rows = HIERARCHY * basis[index // n] + (1 - HIERARCHY) * basis[index % n]
    return torch.cat([table[: min(n, count)], rows[n:].to(table.dtype)])
