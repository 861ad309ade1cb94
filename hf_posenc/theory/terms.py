"""The four terms of an attention score (Dai et al. 2019, arXiv:1901.02860, section 3.3), measured in a model.

Where position vectors `U` are added to the embeddings `E`, a score is a sum of four terms,

    A_ij = E_i W_q . W_k E_j + E_i W_q . W_k U_j + U_i W_q . W_k E_j + U_i W_q . W_k U_j

content against content, content against position, and so on. Transformer-XL replaces `U_j` by a vector of the distance,
and `U_i W_q` by one vector for all positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..analysis import probe
from ..attention_call import Call
from ..calibration.observe import attending, attention_call, observe
from ..errors import UnsupportedModelError
from ..live.base_model import BaseModel
from ..live.eval_mode import evaluation
from ..live.watch import LayerCall, first, recorded
from ..measurement import Result
from . import vectors

ABSOLUTE: tuple[str, ...] = ("content-content", "content-position", "position-content", "position-position")
"""Names of the terms where vectors are added: of the query, then of the key."""
FAR = 1e8
"""Factor of hidden states that makes all that a layer adds to them negligible, if its norms come first."""
KEPT = 1e-3
"""Largest relative change of hidden states multiplied by `FAR`, by a layer that hands them on."""
LINEAR = 1e-4
"""Largest relative residual of queries and keys as sums of content and position; some norms are in float32."""


@dataclass(frozen=True)
class LayerTerms(Result):
    """The four terms of the scores of one layer.

    Only the differences between the keys of a query count, because the softmax does not see what they have in common.

    Attributes:
        index: index of the layer.
        shares: (H, 4) float64, covariance of each term with the score over the variance of the score, among the visible
            keys of a query, pooled over queries and texts. The four sum to 1. A term that works against the others is
            negative.
        sizes: (H, 4) float64, standard deviation of each term among the keys of a query, pooled likewise, nats.
    """

    index: int
    shares: Tensor
    sizes: Tensor


@dataclass(frozen=True)
class ScoreTerms(Result):
    """The four terms of the scores of a model, layer by layer and head by head.

    Attributes:
        label: the model's class.
        names: names of the four terms: `ABSOLUTE`, or those that a scheme gives its own.
        layers: one entry per layer that was measured.
        tokens: number of tokens in a text.
    """

    label: str
    names: tuple[str, ...]
    layers: tuple[LayerTerms, ...]
    tokens: int

    def __str__(self) -> str:
        """Return a table of the shares, the mean over heads and the range."""
        lines = [f"{self.label}: what attention scores are made of (%, mean of the heads, least to most)"]
        lines.append(f"  {'layer':<6}" + "".join(f"{name:>24}" for name in self.names))
        for layer in self.layers:
            percent = 100 * layer.shares
            cells = zip(percent.mean(0).tolist(), percent.amin(0).tolist(), percent.amax(0).tolist(), strict=True)
            row = "".join(f"{f'{mean:.1f} ({low:.0f} to {high:.0f})':>24}" for mean, low, high in cells)
            lines.append(f"  {layer.index:<6}{row}")
        return "\n".join(lines)


@torch.no_grad()
def score_terms(
    model: PreTrainedModel, tokens: Tensor, *, layers: Sequence[int] | None = None, progress: bool = False
) -> ScoreTerms:
    """Split the attention scores of a model into Dai's four terms.

    A scheme that has such terms itself (`transformer_xl`) provides them. Otherwise the model must add vectors to its
    hidden states. The position part of a hidden state is the sum of the vectors that were added up to this layer. All
    else is content, also what lower layers have made of positions. In the first layer this is the equation of the
    paper. Norms divide both parts by what they divide their sum by. Biases of norms and projections are content.
    Queries and keys are taken as they enter the scores, rotated if the model rotates them, before a soft cap.
    Everything is computed in float64, on a copy if the model is in another dtype.

    Args:
        model: patched or stock.
        tokens: (T,) or (B, T) text without padding, T >= 2; takes some B H T^2 numbers of memory.
        layers: indices; None means all that have these terms.
        progress: show a progress bar.

    Returns:
        ScoreTerms.

    Raises:
        ValueError: if no layer, or one of those named, has such terms.
        UnsupportedModelError: if queries and keys are no such sums, or if the vectors do not stay in the hidden states.
    """
    tokens = probe.check_tokens(tokens, 2)
    label = type(model).__name__
    base = BaseModel.of(model)
    if base.hides_attention:
        raise UnsupportedModelError(
            f"the attention of a stock {label} never calls transformers' attention interface, so that nobody sees its "
            'queries and keys: patch it first; patch_model(model, "learned") keeps a trained table as it is'
        )
    with vectors.in_float64(model) as wide:
        names, rows = _measured(wide, tokens, label, layers, progress)
    return ScoreTerms(label, names, tuple(rows), tokens.shape[1])


def _measured(
    model: PreTrainedModel, tokens: Tensor, label: str, layers: Sequence[int] | None, progress: bool
) -> tuple[tuple[str, ...], list[LayerTerms]]:
    """Return the names of the terms, and the terms of each layer of a model in float64."""
    base = BaseModel.of(model)
    found = base.found
    with evaluation(model), attending(model, base):
        with recorded(found.layers, behind_hooks=True) as entered:
            seen = observe(model, tokens, list(found.attention_of))
        own: dict[int, LayerTerms] = {}
        names = ABSOLUTE
        for index, each in seen.items():
            if terms := each.call.form.terms(each.call.widened()) if each.call.form else {}:
                names, own[index] = tuple(terms), _layer(index, list(terms.values()), each.call)
        modules = vectors.sources(model)
        unchanged = [index for index, each in seen.items() if each.call.form and not each.call.form.positional]
        plain = unchanged if modules else []
        known = list(own) or plain
        chosen = known if layers is None else list(layers)
        if not chosen or set(chosen) - set(known):
            raise ValueError(
                f"{label} has {f'the four terms in the layers {known}' if known else 'no layer with the four terms'}: "
                "they exist where position vectors are added to the hidden states and attention is not changed, and "
                "in transformer_xl"
            )
        if own:
            return names, [own[index] for index in chosen]
        added = _direct(vectors.added(model, tokens[:1]), len(found.layers))
        rows = []
        with vectors.replaced(modules, torch.zeros_like):
            _require_kept(label, found.layers[: max(chosen)], entered)
            for index in tqdm(chosen, disable=not progress, desc="terms", unit="layer"):
                call = seen[index].call
                queries, keys = _parts(base, index, entered[index], added[index])
                # The first of a pair of parts is the content.
                rows.append(_layer(index, [q @ k.mT * call.scaling for q in queries for k in keys], call))
    return names, rows


def _direct(added: dict[int, Tensor], layers: int) -> list[Tensor]:
    """Return the sum of the vectors that were added in front of each layer and those below it, (T, E) each."""
    none = torch.zeros_like(next(iter(added.values())))
    return list(itertools.accumulate(added.get(index, none) for index in range(layers)))


def _require_kept(label: str, layers: list[nn.Module], entered: list[LayerCall]) -> None:
    """Raise UnsupportedModelError if a layer replaces the hidden states that it reads instead of adding to them.

    A layer whose norms come first adds something bounded to its input, however large the input is.
    """
    for index, layer in enumerate(layers):
        call = entered[index]
        large = FAR * call.hidden_states
        left = first(layer(large, *call.args, **call.kwargs))
        if not (left - large).norm() < KEPT * large.norm():
            raise UnsupportedModelError(
                f"layer {index} of {label} does not hand on the hidden states that it reads, with something added, so "
                f"that position vectors are not in those of the layers above: layers=range({index + 1}) looks at those "
                "that still have them"
            )


Parts = tuple[Tensor, Tensor]
"""Content and position part of queries or keys, (B, H, T, D) each."""


def _parts(base: BaseModel, index: int, seen: LayerCall, added: Tensor) -> tuple[Parts, Parts]:
    """Split queries and keys of a layer in front of which no vectors are added at the moment.

    Behind a norm they are `A h / s(h) + b`, linear in the hidden states `h` except for a number `s` of each token. The
    outputs for the content alone and for the position alone have the right directions. They lack the factors
    `s(content) / s(h)` and `s(position) / s(h)`, two unknowns that are fitted to the D numbers of a head.
    """
    layer, attention = base.found.layers[index], base.found.attention_of[index]
    whole = seen.hidden_states
    position = added.to(whole).expand_as(whole)
    inputs = (whole, whole - position, position, torch.zeros_like(whole))
    calls = [attention_call(layer, attention, hidden, seen).widened() for hidden in inputs]
    return _split([call.query for call in calls], base, index), _split([call.key for call in calls], base, index)


def _split(values: list[Tensor], base: BaseModel, index: int) -> Parts:
    """Return the parts of a sum, from the values of the sum, of each part alone, and of zero."""
    constant = values[-1]
    whole, content, position = (value - constant for value in values[:-1])
    columns = torch.stack([content, position], -1)
    factors = torch.linalg.pinv(columns) @ whole[..., None]
    parts = columns * factors.mT
    if not (whole - parts.sum(-1)).norm() <= LINEAR * whole.norm():
        raise UnsupportedModelError(
            f"queries or keys in layer {index} of {type(base.model).__name__} are no sum of a content and a position "
            "part: more than one norm stands between them and the hidden states"
        )
    return constant + parts[..., 0], parts[..., 1]


def _layer(index: int, terms: list[Tensor], call: Call) -> LayerTerms:
    """Return shares and sizes of terms (B, H, Q, L) of a score, among the visible keys of each query."""
    visible = call.visible().expand(terms[0].shape)
    counts = visible.sum(-1, keepdim=True).clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        seen = values.masked_fill(~visible, 0.0)
        return (seen - seen.sum(-1, keepdim=True) / counts).masked_fill(~visible, 0.0)

    def pooled(values: Tensor) -> Tensor:
        return values.double().sum((0, 2, 3)).cpu()

    each = [centred(term) for term in terms]
    total = torch.stack(each).sum(0)
    variance = pooled(total * total).clamp(min=1e-300)
    pairs = pooled(visible)
    return LayerTerms(
        index,
        shares=torch.stack([pooled(term * total) / variance for term in each], -1),
        sizes=torch.stack([(pooled(term * term) / pairs).sqrt() for term in each], -1),
    )
