"""The four terms of an attention score (Dai et al. 2019, arXiv:1901.02860, section 3.3), measured in a model.

If position vectors `U` are added to the embeddings `E`, a score is the sum of four terms,

    A_ij = E_i W_q . W_k E_j + E_i W_q . W_k U_j + U_i W_q . W_k E_j + U_i W_q . W_k U_j

content with content, content with position, position with content, and position with position. Transformer-XL replaces
`U_j` by a vector of the distance, and `U_i W_q` by one vector for all positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..analysis import probe
from ..calibration.observe import attending, attention_call, observe
from ..core.attention_call import Call
from ..core.errors import UnsupportedModelError
from ..core.measurement import Result
from ..model.base_model import BaseModel
from ..model.eval_mode import evaluation
from ..model.watch import LayerCall, first, recorded
from . import vectors

ABSOLUTE: tuple[str, ...] = ("content-content", "content-position", "position-content", "position-position")
"""Names of the terms of models that add vectors: the part of the query, then the part of the key."""
LARGE = 1e8
"""Hidden states are multiplied by this. What a pre-norm layer adds to them is then negligible."""
UNCHANGED = 1e-3
"""A layer that changes hidden states times `LARGE` by less than this share counts as adding to them."""
LINEAR = 1e-4
"""Largest relative residual of queries and keys as sums of a content and a position part. Some norms are in float32."""


@dataclass(frozen=True)
class LayerTerms(Result):
    """The four terms of the scores of one layer.

    Only differences between the keys of a query count, because the softmax ignores a common constant.

    Attributes:
        index: index of the layer.
        shares: (H, 4) float64, covariance of each term with the score, divided by the variance of the score. Both are
            taken over the visible keys of a query, and pooled over queries and texts. The four shares sum to 1. A term
            that counteracts the others has a negative share.
    """

    index: int
    shares: Tensor


@dataclass(frozen=True)
class ScoreTerms(Result):
    """The four terms of the scores of a model, layer by layer and head by head.

    Attributes:
        label: the model's class.
        names: names of the four terms: `ABSOLUTE`, or a scheme's names.
        layers: the measured layers.
    """

    label: str
    names: tuple[str, ...]
    layers: tuple[LayerTerms, ...]

    def __str__(self) -> str:
        """Return a table of the shares: mean, minimum and maximum over heads."""
        lines = [f"{self.label}: shares of attention scores (%, mean of the heads, least to most)"]
        lines.append(f"  {'layer':<6}" + "".join(f"{name:>24}" for name in self.names))
        for layer in self.layers:
            percent = 100 * layer.shares
            cells = zip(percent.mean(0).tolist(), percent.amin(0).tolist(), percent.amax(0).tolist(), strict=True)
            row = "".join(f"{f'{mean:.1f} ({low:.0f} to {high:.0f})':>24}" for mean, low, high in cells)
            lines.append(f"  {layer.index:<6}{row}")
        return "\n".join(lines)


@torch.no_grad()
def score_terms(model: PreTrainedModel, tokens: Tensor, *, layers: Sequence[int] | None = None) -> ScoreTerms:
    """Split the attention scores of a model into Dai's four terms.

    A scheme with four terms in its formula (`transformer_xl`) provides them. Otherwise the model must add vectors to
    its hidden states. The position part of a hidden state is then the sum of the vectors that were added up to this
    layer. The rest is content, also what lower layers have computed from positions. In the first layer this is the
    equation of the paper. A norm divides both parts by the same number as their sum. Biases of norms and projections
    are content. Queries and keys are rotated if the model rotates them, and scores are taken before a soft cap. The
    computation is in float64, on a copy if the model has another dtype.

    Args:
        model: a patched or stock model.
        tokens: (T,) or (B, T) text without padding, T >= 2; takes about B H T^2 numbers of memory.
        layers: indices of layers; None means all layers with four terms.

    Returns:
        ScoreTerms.

    Raises:
        ValueError: if no layer has four terms, or one of `layers` has not.
        UnsupportedModelError: if queries and keys are no sums of two parts, or if a layer does not pass the vectors on.
    """
    tokens = probe.check_tokens(tokens, 2)
    label = type(model).__name__
    base = BaseModel.of(model)
    if base.hides_attention:
        raise UnsupportedModelError(
            f"the attention of a stock {label} does not call transformers' attention interface, so its queries and "
            'keys cannot be read: patch it first; patch_model(model, "learned") keeps a trained table as it is'
        )
    with vectors.in_float64(model) as wide:
        names, rows = _measure_layers(wide, tokens, label, layers)
    return ScoreTerms(label, names, tuple(rows))


def _measure_layers(
    model: PreTrainedModel, tokens: Tensor, label: str, layers: Sequence[int] | None
) -> tuple[tuple[str, ...], list[LayerTerms]]:
    """Return the names of the terms, and the terms of the layers of a float64 model."""
    base = BaseModel.of(model)
    modules = base.modules
    with evaluation(model), attending(model, base):
        with recorded(modules.layers, behind_hooks=True) as entered:
            observed = observe(model, tokens, list(modules.attention_of))
        scheme_terms: dict[int, LayerTerms] = {}
        names = ABSOLUTE
        for index, each in observed.items():
            if terms := each.call.form.terms(each.call.widened()) if each.call.form else {}:
                names, scheme_terms[index] = tuple(terms), _layer_terms(index, list(terms.values()), each.call)
        sources = vectors.sources(model)
        unchanged = [index for index, each in observed.items() if each.call.form and not each.call.form.positional]
        with_terms = list(scheme_terms) or (unchanged if sources else [])
        chosen = with_terms if layers is None else list(layers)
        if not chosen or set(chosen) - set(with_terms):
            which = f"the four terms in the layers {with_terms}" if with_terms else "no layer with the four terms"
            raise ValueError(
                f"{label} has {which}: a layer has them if position vectors are added to its hidden states and its "
                "attention is not changed, or under transformer_xl"
            )
        if scheme_terms:
            return names, [scheme_terms[index] for index in chosen]
        added = vectors.added(model, tokens[:1])
        zeros = torch.zeros_like(next(iter(added.values())))
        # For each layer the sum of the vectors that were added before it or before a lower layer.
        sums = list(itertools.accumulate(added.get(index, zeros) for index in range(len(entered))))
        rows = []
        with vectors.replaced(sources, torch.zeros_like):
            _require_residual(label, modules.layers[: max(chosen)], entered)
            for index in chosen:
                call = observed[index].call
                queries, keys = _split_layer(base, index, entered[index], sums[index])
                # Content comes before position in both pairs, as in `ABSOLUTE`.
                rows.append(_layer_terms(index, [q @ k.mT * call.scaling for q in queries for k in keys], call))
    return names, rows


def _require_residual(label: str, layers: list[nn.Module], entered: list[LayerCall]) -> None:
    """Raise UnsupportedModelError if a layer replaces its hidden states instead of adding to them.

    A pre-norm layer adds something bounded to its input, however large the input is.
    """
    for index, layer in enumerate(layers):
        call = entered[index]
        large = LARGE * call.hidden_states
        output = first(layer(large, *call.args, **call.kwargs))
        if not (output - large).norm() < UNCHANGED * large.norm():
            raise UnsupportedModelError(
                f"layer {index} of {label} replaces its hidden states instead of adding to them, so the layers above "
                f"it do not read the position vectors: layers=range({index + 1}) measures the layers that do"
            )


Parts = tuple[Tensor, Tensor]
"""Content part and position part of queries or keys, both (B, H, T, D)."""


def _split_layer(base: BaseModel, index: int, arguments: LayerCall, added: Tensor) -> tuple[Parts, Parts]:
    """Split the queries and keys of a layer, while its position vectors are replaced by zeros.

    Queries and keys are `A h / s(h) + b`, where a norm divides the hidden state `h` of a token by `s(h)`. Running the
    layer on the content alone and on the position alone gives both parts up to the factors `s(content) / s(h)` and
    `s(position) / s(h)`. These two numbers are fitted to the D coordinates of a head.

    Args:
        base: the model as its family describes it.
        index: index of the layer.
        arguments: the layer's recorded arguments, with the vectors.
        added: (T, E) position part of the hidden states.
    """
    layer, attention = base.modules.layers[index], base.modules.attention_of[index]
    whole = arguments.hidden_states
    position = added.to(whole).expand_as(whole)
    inputs = (whole, whole - position, position, torch.zeros_like(whole))
    calls = [attention_call(layer, attention, hidden, arguments).widened() for hidden in inputs]
    queries, keys = [call.query for call in calls], [call.key for call in calls]
    return _split_sum(queries, base, index), _split_sum(keys, base, index)


def _split_sum(values: list[Tensor], base: BaseModel, index: int) -> Parts:
    """Return the two parts of queries or keys. `values` are those of the sum, the content, the position and zero."""
    constant = values[-1]
    whole, content, position = (value - constant for value in values[:-1])
    columns = torch.stack([content, position], -1)
    factors = torch.linalg.pinv(columns) @ whole[..., None]
    parts = columns * factors.mT
    if not (whole - parts.sum(-1)).norm() <= LINEAR * whole.norm():
        raise UnsupportedModelError(
            f"queries or keys in layer {index} of {type(base.model).__name__} are no sum of a content and a position "
            "part: more than one norm lies between them and the hidden states"
        )
    return constant + parts[..., 0], parts[..., 1]


def _layer_terms(index: int, terms: list[Tensor], call: Call) -> LayerTerms:
    """Return the shares of terms (B, H, Q, L), taken over the visible keys of each query."""
    visible = call.visible().expand(terms[0].shape)
    counts = visible.sum(-1, keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        values = values.masked_fill(~visible, 0.0)
        return (values - values.sum(-1, keepdim=True) / counts).masked_fill(~visible, 0.0)

    def pooled(values: Tensor) -> Tensor:
        return values.double().sum((0, 2, 3)).cpu()

    centred_terms = [centred(term) for term in terms]
    total = torch.stack(centred_terms).sum(0)
    variance = pooled(total * total).clamp(min=1e-300)
    shares = torch.stack([pooled(term * total) / variance for term in centred_terms], -1)
    return LayerTerms(index, shares)
