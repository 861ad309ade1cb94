"""verify(model): moves the positions under a patched model, layer by layer, and reports who notices."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import positions
from .errors import NotPatchedError
from .families.base import Family
from .layer_state import STATE, OnLayer, on_attention
from .live.base_model import BaseModel
from .live.eval_mode import evaluation
from .live.obstacles import check_in_place, check_unwrapped
from .live.patch_record import Patch, patch_of, without_adapter
from .live.undo import Keep, SetAttribute, SetModule, Undo
from .live.watch import LayerCall, first, recorded
from .modules import PositionEmbedding, PositionModule, WithoutPositions
from .patching.hooks import require_attention
from .upstream import NAME
from .upstream.position_channel import as_channel
from .upstream.replaced_attention import named, stock_output
from .upstream.rotary import IdentityRotary

NOTICES = 1e-7
"""Smallest relative change that counts: a layer that ignores positions repeats the same arithmetic, change 0."""

SPANS = (2**8, 2**12, 2**16)
"""Over so many positions the tokens are spread, one after the other, while a layer ignores closer ones."""


@dataclass(frozen=True)
class LayerReport:
    """The response of one decoder layer when the positions move and everything else stays.

    Attributes:
        index: of the layer.
        response: relative change of the layer's output, as the model stands.
        live_response: the same with the scheme's parameters drawn at random, and then with positions further and
            further apart, until the layer responds. A scheme that starts neutral (DA-Transformer) needs the first, a
            scheme that acts from 8192 tokens on the second. A dead scheme never responds.
        expected: whether the scheme acts in this layer.
    """

    index: int
    response: float
    live_response: float
    expected: bool

    @property
    def ok(self) -> bool:
        """Whether the layer behaves as the scheme says."""
        return (self.live_response > NOTICES) == self.expected


@dataclass(frozen=True)
class Report:
    """The findings of `verify`. Changes are relative norms: |changed - original| / |original|.

    Attributes:
        scheme: name of the scheme, or names of the schemes.
        layers: one report per decoder layer.
        input_response: change of the hidden states that enter the first layer.
        model_response: change of the logits (or last hidden states) when all positions move.
        order_response: change at the last token when two earlier tokens swap places; the causal mask alone gives some.
        problems: what is wrong, in words; empty if nothing is.
    """

    scheme: str
    layers: tuple[LayerReport, ...]
    input_response: float
    model_response: float
    order_response: float
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def answers_through(self) -> str:
        """`positions`, `mask` (only the causal mask tells order), or `nothing`."""
        if max(self.model_response, *(layer.live_response for layer in self.layers)) > NOTICES:
            return "positions"
        return "mask" if self.order_response > NOTICES else "nothing"

    def __bool__(self) -> bool:
        """Whether nothing is wrong."""
        return self.ok

    def __str__(self) -> str:
        """Return a table."""
        answering = sum(layer.live_response > NOTICES for layer in self.layers)
        lines = [
            f"{self.scheme}: {'ok' if self.ok else 'NOT OK'}; answers through {self.answers_through}; "
            f"{answering}/{len(self.layers)} layers answer to positions",
            f"  {'place':<10} {'response':>10} {'live':>10}",
            f"  {'input':<10} {self.input_response:>10.2e}",
        ]
        for layer in self.layers:
            mark = "" if layer.ok else "  <- should answer" if layer.expected else "  <- should not answer"
            lines.append(f"  {f'layer {layer.index}':<10} {layer.response:>10.2e} {layer.live_response:>10.2e}{mark}")
        lines.append(f"  {'model':<10} {self.model_response:>10.2e}")
        lines.append(f"  {'order':<10} {self.order_response:>10.2e}")
        return "\n".join(lines + [f"  problem: {problem}" for problem in self.problems])


@torch.no_grad()
def verify(model: PreTrainedModel, *, length: int | None = None, seed: int = 0) -> Report:
    """Move the positions under a patched model and report, per layer and for the whole, whether the output answers.

    Each layer is run again on the hidden states it had, with only its position inputs changed (the positions reversed),
    so an answer cannot leak from one layer to the next. Where the scheme changes attention scores, attention without it
    is compared with the model's own eager attention first. Costs about six short forward passes, and up to six more
    where a layer does not answer to close positions. Parameters, mode and caches are left as they were.

    Args:
        model: patched, on any device, in any mode; with an adapter of PEFT around it, the adapter's layers take part.
        length: tokens to use; None means 16, or as many positions as the scheme has.
        seed: of the tokens and of the trial parameters.

    Returns:
        Report; true if everything is as the scheme says.

    Raises:
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if it is wrapped (DistributedDataParallel), sharded (FSDP) or offloaded.
        ValueError: if `length` is under 4 or beyond the positions of the scheme, or from the model's own forward pass.
    """
    check_unwrapped(model, "verify the model")
    model = without_adapter(model)
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: there is nothing to verify")
    check_in_place(model, "verify the model", one_device=False)
    base = BaseModel.of(model)
    generator = torch.Generator().manual_seed(seed)
    weight = base.token_weight
    tokens = torch.randint(weight.shape[0], (1, _length(length, patch.limit)), generator=generator).to(weight.device)
    with evaluation(model), _unguarded(base.found.decoder):
        ours = patch.attends and base.config._attn_implementation == NAME
        lost, left = _self_test(base, patch, tokens) if ours else ({}, {})
        expected, at_input = _answering(patch, base), _answers_at_input(patch, base)
        standing = _Measurement(base, tokens)
        trial = _try(standing, base, patch.limit, tokens, expected, at_input, generator)
        order = _change(_output(base.model, _swapped(tokens, weight.shape[0]))[:, -1], standing.output[:, -1])
    layers = tuple(
        LayerReport(i, response, live, expected[i])
        for i, (response, live) in enumerate(zip(standing.layers, trial.layers, strict=True))
    )
    problems = [
        *_problems_of_attention(patch, base, lost, left),
        *_problems_of_layers(layers),
        *_problems_of_input(at_input, standing.input, trial.input),
        *_problems_of_rotation(patch, base),
    ]
    return Report(patch.name, layers, standing.input, standing.model, order, tuple(problems))


def _length(wanted: int | None, limit: int | None) -> int:
    """Return the number of tokens to use; ValueError if a scheme of `limit` positions has not so many."""
    if wanted is None:
        return 16 if limit is None else min(16, limit)
    if wanted < 4 or (limit is not None and wanted > limit):
        raise ValueError(f"length must be at least 4{'' if limit is None else f' and at most {limit}'}, not {wanted}")
    return wanted


def _swapped(tokens: Tensor, vocabulary: int) -> Tensor:
    """Return tokens of which the first two have swapped places; of two that are alike the first is another one."""
    swapped = tokens.clone()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    if swapped.equal(tokens):
        swapped[0, 0] = (swapped[0, 0] + 1) % vocabulary
    return swapped


def _try(
    standing: _Measurement,
    base: BaseModel,
    limit: int | None,
    tokens: Tensor,
    expected: list[bool],
    at_input: bool,
    generator: torch.Generator,
) -> _Measurement:
    """Return the responses with random parameters, and with positions further apart, until all that must answer do.

    Args:
        standing: the responses of the model as it stands.
        base: the model.
        limit: number of positions that exist, or None.
        tokens: (1, T).
        expected: for each layer whether it must answer.
        at_input: whether the hidden states that enter the first layer must.
        generator: of the random parameters.
    """
    trial = standing
    owners = [module for module in base.model.modules() if isinstance(module, PositionModule)]
    if min(standing.layers) <= NOTICES and any(True for owner in owners for _ in owner.parameters()):
        with _random_parameters(owners, generator):
            trial = _Measurement(base, tokens)
    for span in SPANS:
        if trial.input > NOTICES or not at_input:
            if all(response > NOTICES for response, wanted in zip(trial.layers, expected, strict=True) if wanted):
                break
        apart = (min(span, limit or span) - 1) // (tokens.shape[1] - 1)
        with _random_parameters(owners, generator):
            trial = trial.or_more(_Measurement(base, tokens, apart))
    return trial


def _problems_of_attention(
    patch: Patch, base: BaseModel, lost: dict[int, float], left: dict[int, float]
) -> Iterator[str]:
    """Yield what is wrong with attention, from the findings of `_self_test`."""
    for index, error in lost.items():
        yield (
            f"layer {index}: attention without the scheme differs from the model's own eager attention by {error:.1%}: "
            "something that belongs to the model's attention is left out"
        )
    for index, answer in left.items():
        yield (
            f"layer {index}: attention without the scheme answers to positions, by {answer:.1%}: what the base had for "
            "them is still in it"
        )
    if patch.attends and (backend := base.config._attn_implementation) != NAME:
        yield f"{patch.name} needs the attention {NAME!r}, but the config says {backend!r}: the scheme is not applied"


def _problems_of_layers(layers: Sequence[LayerReport]) -> Iterator[str]:
    """Yield which layers answer otherwise than the scheme says."""
    for layer in layers:
        if not layer.ok:
            does = "ignores positions" if layer.expected else "answers to positions that it should not see"
            yield f"layer {layer.index} {does}"


def _problems_of_input(at_input: bool, standing: float, trial: float) -> Iterator[str]:
    """Yield what is wrong with the hidden states that enter the first layer.

    Args:
        at_input: whether they must answer to positions.
        standing: their response as the model stands.
        trial: their response with random parameters.
    """
    if at_input and trial <= NOTICES:
        yield "the hidden states that enter the first layer ignore positions"
    if not at_input and standing > NOTICES:
        yield "the hidden states that enter the first layer answer to positions: the base's own table is still there"


def _problems_of_rotation(patch: Patch, base: BaseModel) -> Iterator[str]:
    """Yield what is wrong with how queries and keys are turned."""
    silenced = all(scheme.layers is None and not scheme.acts_on.rotations(scheme) for scheme in patch.schemes)
    if silenced and base.found.rotary is not None and not isinstance(base.found.rotary, IdentityRotary):
        yield "queries and keys are rotated: the base's own rotary embedding is still there"
    for scheme in patch.schemes:
        for layer in _turned_otherwise(scheme, base):
            yield f"layer {layer}: another rotation than that of {scheme.name} turns queries and keys"


def _answering(patch: Patch, base: BaseModel) -> list[bool]:
    """Return for each layer whether it must answer to its positions."""
    own = base.family.always_replaced and base.own_scheme(tuple(base.sizes)) is not None
    expected = [own or rotated for rotated in base.rotated]  # layers that keep what the base has
    for scheme in patch.schemes:
        for layer in base.layers_of(scheme):
            expected[layer] = scheme.acts_on.answers(layer, base)
    return expected


def _answers_at_input(patch: Patch, base: BaseModel) -> bool:
    """Return whether the hidden states that enter the first layer must answer to positions."""
    kept = all(scheme.layers is not None for scheme in patch.schemes)
    table = base.found.position_table
    # Ours may be inside a wrapper of PEFT.
    if kept and table is not None and not any(isinstance(part, PositionEmbedding) for part in table.modules()):
        return True
    return any(scheme.acts_on.answers_at_input(base) for scheme in patch.schemes)


def _turned_otherwise(scheme: Any, base: BaseModel) -> list[int]:
    """Return the layers whose rotary module does not hold the rotation that a scheme builds itself."""
    if None not in scheme.acts_on.rotations(scheme):  # none, or one that transformers' own modules make
        return []
    with torch.device("meta"):
        kind = type(scheme.build(base.rotation.dims))
    wrong = []
    for layer in base.layers_of(scheme):
        for holder in (base.found.layers[layer], base.found.attention_of[layer]):
            if (own := getattr(holder, STATE, OnLayer()).rotation) is not None:
                rotary = own()
                break
        else:
            rotary = base.found.rotary
        if rotary is None or not any(isinstance(each, kind) for each in rotary.modules()):
            wrong.append(layer)
    return wrong


class _Measurement:
    """Responses of one model as it stands."""

    def __init__(self, base: BaseModel, tokens: Tensor, apart: int = 1) -> None:
        model, layers = base.model, base.found.layers
        forward = torch.arange(tokens.shape[1], device=tokens.device)[None] * apart
        inputs, self.output = _trace(model, layers, tokens, forward)
        moved_inputs, moved_output = _trace(model, layers, tokens, forward.flip(-1))
        self.model = _change(moved_output, self.output)
        self.input = _change(moved_inputs[0].hidden_states, inputs[0].hidden_states)
        self.layers = []
        for layer, call, moved in zip(layers, inputs, moved_inputs, strict=True):
            original = first(layer(call.hidden_states, *call.args, **call.kwargs))
            elsewhere = {**moved.kwargs, **_lent(base.family, call)}
            self.layers.append(_change(first(layer(call.hidden_states, *moved.args, **elsewhere)), original))

    def or_more(self, other: _Measurement) -> _Measurement:
        """Return these responses, with the other ones where those are larger."""
        both = copy.copy(self)
        both.input = max(self.input, other.input)
        both.layers = [max(pair) for pair in zip(self.layers, other.layers, strict=True)]
        return both


def _lent(family: Family, call: LayerCall) -> dict[str, Any]:
    """Return a copy of the keys and values that a layer was lent, for a call in which only positions differ."""
    return {} if family.lends_in is None else {family.lends_in: copy.copy(call.kwargs[family.lends_in])}


def _self_test(base: BaseModel, patch: Patch, tokens: Tensor) -> tuple[dict[int, float], dict[int, float]]:
    """Compare attention without a scheme with the model's own eager attention, and with itself at moved positions.

    A feature of the base that our attention function leaves out shows in the first, and nowhere else. Where the stock
    attention was replaced, because it bypasses transformers' interface, its own forward is the model's own eager
    attention. Positions of the base that were not taken out of a layer show in the second.

    Returns:
        Layer index -> relative change, where there is one that should not be.
    """
    attentions: dict[int, Any] = base.found.attention_of
    model, family = base.model, base.family
    order = torch.arange(tokens.shape[1], device=tokens.device)[None]
    calls, _ = _trace(model, list(attentions.values()), tokens, order)
    moved, _ = _trace(model, list(attentions.values()), tokens, order.flip(-1))
    silenced = base.layers_with_scores()
    lost, left = {}, {}
    for (index, attention), call, other in zip(attentions.items(), calls, moved, strict=True):
        hidden, args, kwargs = call.hidden_states, call.args, call.kwargs
        blank = hidden.new_zeros(1, 1, tokens.shape[1], tokens.shape[1])

        def eager_mask(given: Any, blank: Tensor = blank) -> Any:
            ours = isinstance(given, Tensor) and given.ndim == 4
            return positions.read(given, *blank.shape[-2:]).mask(blank) if ours else given

        undo = Undo()
        try:
            undo.make(SetModule(attention, "posenc", WithoutPositions()))
            # The eager attention has no window but the base's own, and no rotation but what it is handed.
            window = family.attention and family.attention.window(attention)
            undo.make(Keep(attention, on_attention, {"engine": "reference", "window": window, "rotation": None}))
            plain = first(attention(hidden, *args, **kwargs))
            elsewhere = named(attention, other.args, other.kwargs) if family.always_replaced else other.kwargs
            # The residual has positions in it, and is not the attention's own.
            if residual := family.attention and family.attention.residual:
                elsewhere = {**elsewhere, residual: named(attention, args, kwargs)[residual]}
            elsewhere = {**elsewhere, **_lent(family, call)}
            rest = () if family.always_replaced else other.args
            answer = _change(first(attention(hidden, *rest, **elsewhere)), plain)
            if index in silenced and answer > NOTICES:
                left[index] = answer
            undo.make(SetAttribute(attention.config, "_attn_implementation_internal", "eager"))
            if family.always_replaced:
                given = named(attention, args, kwargs)
                mask = eager_mask(as_channel(given["attention_mask"], as_bool=family.mask_as_bool))
                own = stock_output(attention, hidden, {**given, "attention_mask": mask})
            else:
                masked = {key: eager_mask(given) for key, given in kwargs.items()}
                own = first(attention(hidden, *(eager_mask(given) for given in args), **masked))
        finally:
            undo.roll_back()
        error = _change(plain, own)
        # Eager attention takes its softmax in float32, whatever the dtype.
        precision = max(torch.finfo(dtype).eps for dtype in (hidden.dtype, torch.float32))
        if not error < precision**0.5:
            lost[index] = error
    return lost, left


def _trace(
    model: PreTrainedModel, layers: list[nn.Module], tokens: Tensor, position_ids: Tensor
) -> tuple[list[LayerCall], Tensor]:
    """Run the model; return what each layer was called with, and the output."""
    with recorded(layers) as calls:
        output = _output(model, tokens, position_ids)
    return calls, output


def _output(model: PreTrainedModel, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
    # A 2-D mask keeps transformers from reading moved positions as packed documents.
    arguments: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
    return model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False, return_dict=True, **arguments)[0]


def _change(changed: Tensor, original: Tensor) -> float:
    return ((changed.double() - original.double()).norm() / original.double().norm().clamp(min=1e-30)).item()


@contextmanager
def _unguarded(decoder: nn.Module) -> Iterator[None]:
    """Let a model with a stock backend run, to measure that it ignores its scheme."""
    hooks = decoder._forward_pre_hooks
    kept = dict(hooks)
    for number, hook in kept.items():
        if hook is require_attention:
            del hooks[number]
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(kept)


@contextmanager
def _random_parameters(owners: list[PositionModule], generator: torch.Generator) -> Iterator[None]:
    """Draw the parameters of position modules at random, and put the old values back bit for bit."""
    parameters = {id(p): p for owner in owners for p in owner.parameters()}.values()
    kept = [p.detach().clone() for p in parameters]
    try:
        for p in parameters:
            p.copy_(torch.randn(p.shape, generator=generator).to(p) * 0.5)
        yield
    finally:
        for p, old in zip(parameters, kept, strict=True):
            p.copy_(old)
