"""Count how many distances have different biases in a dtype, in this package and in the code of BLOOM and Falcon.

bfloat16 has 8 significant bits. So the biases of 8192 keys have about 900 different values, and most neighbouring
distances get the same bias. This package computes biases in float32 for every dtype of a model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi

from ..dims import Dims
from ..measurement import Result
from ..modules import ScoreModule
from ..schemes.base import Scheme
from . import probe

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class DistinctBiases(Result):
    """Number of different biases that one method computes.

    Attributes:
        method: `hf_posenc`, `bloom` or `falcon`.
        dtype: dtype of the model, e.g. `bfloat16`.
        length: number of distances, 0 .. length - 1, in tokens.
        heads: number of different values in each head; `length` if all differ.
        finite: whether all biases are finite.
    """

    method: str
    dtype: str
    length: int
    heads: tuple[int, ...]
    finite: bool

    def __str__(self) -> str:
        """Return one line."""
        low, high = min(self.heads), max(self.heads)
        return (
            f"{self.method:<10} {self.dtype:<9} {low if low == high else f'{low} to {high}'} of {self.length} "
            f"distances told apart{'' if self.finite else ', some infinite'}"
        )


def precision_audit(
    length: int,
    *,
    num_heads: int = 16,
    dtypes: Sequence[torch.dtype] = DTYPES,
    scheme: str | Scheme = "alibi",
    **hyperparameters: Any,
) -> list[DistinctBiases]:
    """Count the different biases that distances 0 .. length - 1 get.

    Args:
        length: number of distances, in tokens.
        num_heads: H.
        dtypes: dtypes of the model.
        scheme: a scheme whose effect is a bias by distance (`alibi`).
        **hyperparameters: hyper-parameters beside a name.

    Returns:
        One entry per dtype for each of `hf_posenc`, `bloom` and `falcon`.

    Raises:
        ValueError: if the scheme has no bias by distance, or `length` is under 1.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, not {length}")
    dims = Dims(
        num_heads=num_heads, num_key_value_heads=num_heads, head_dim=64, hidden_size=64 * num_heads, num_layers=1
    )
    resolved, module = probe.build(scheme, dims=dims, **hyperparameters)
    keys = torch.ones(1, length, dtype=torch.int64)
    found = []
    for dtype in dtypes:
        form = None
        if isinstance(module, ScoreModule):  # a copy: bfloat16 must not round the parameters of the dtypes after it
            form = copy.deepcopy(module).to(dtype).form(torch.empty(0, dtype=dtype))
        bias = None if form is None or form.multiplies else form.curve(length)
        if bias is None:
            raise ValueError(f"{resolved.name} has no bias by distance; alibi has")
        # Theirs grow with the key's index, ours fall with the distance. Before rounding, both softmaxes are one.
        theirs = {_model_of(build): build(keys, num_heads, dtype) for build in (bloom_alibi, falcon_alibi)}
        for method, values in {"hf_posenc": bias.detach(), **theirs}.items():
            found.append(distinct(method, values.reshape(num_heads, length), dtype))
    return found


def _model_of(build: Callable[..., Tensor]) -> str:
    """Return the model type of a function from transformers' modeling files."""
    return build.__module__.rpartition("modeling_")[2]


def distinct(method: str, biases: Tensor, dtype: torch.dtype) -> DistinctBiases:
    """Count the different values of biases (H, length)."""
    counts = tuple(row.unique().numel() for row in biases)
    name = str(dtype).removeprefix("torch.")
    return DistinctBiases(method, name, biases.shape[-1], counts, bool(biases.isfinite().all()))
