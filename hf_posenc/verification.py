"""verify(model): change the positions under a patched model and report which layers respond."""

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
from .modules import Additions, PositionEmbedding, PositionModule, WithoutPositions, owner_of
from .patching.hooks import require_attention
from .schemes.base import Scheme
from .upstream import NAME
from .upstream.positions_in_mask import as_channel
from .upstream.replaced_attention import named, stock_output
from .upstream.rotary import IdentityRotary

NOTICES = 1e-7
"""Relative change above which a layer responds. A layer that ignores positions repeats its arithmetic: change 0."""

SPANS = (2**8, 2**12, 2**16, 2**20)
"""Numbers of positions over which to spread the tokens, in this order, until every expected layer responds."""


@dataclass(frozen=True)
class LayerReport:
    """The response of one decoder layer when only its positions change.

    Attributes:
        index: index of the layer.
        response: relative change of the layer's output, with the model's current parameters.
        live_response: relative change with random parameters of the scheme, then also with positions further and
            further apart, until the layer responds. A scheme that starts neutral (DA-Transformer) needs random
            parameters. A scheme that acts from 8192 tokens on needs distant positions. A dead scheme never responds.
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
class AdditionReport:
    """The change of one layer's output when an addition to its positions is left out, and nothing else changes.

    Attributes:
        scheme: name of the scheme that adds, such as `temperature`.
        layer: index of the layer.
        response: relative change, with the model's current parameters.
        live_response: relative change with random parameters of the scheme, then also with positions further apart, as
            in `LayerReport`.
        acts: whether `response` is more than rounding. If not, the addition is neutral at the tokens of the probe.
        problem: what is wrong, in words; empty if nothing is.
    """

    scheme: str
    layer: int
    response: float
    live_response: float
    acts: bool
    problem: str


@dataclass(frozen=True)
class Report:
    """The findings of `verify`. A change is a relative norm: |changed - original| / |original|.

    Attributes:
        scheme: name of the scheme, or names of the schemes.
        layers: one report per decoder layer.
        input_response: change of the hidden states that enter the first layer.
        model_response: change of the logits (or last hidden states) when all positions change.
        order_response: change at the last token when two earlier tokens swap places. The causal mask alone causes one.
        problems: what is wrong, in words; empty if nothing is.
        additions: one report for each layer of each scheme that joins the positions of its layers.
    """

    scheme: str
    layers: tuple[LayerReport, ...]
    input_response: float
    model_response: float
    order_response: float
    problems: tuple[str, ...]
    additions: tuple[AdditionReport, ...] = ()

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
        for name in dict.fromkeys(addition.scheme for addition in self.additions):
            lines.append("  adds       " + self._line_of(name))
        return "\n".join(lines + [f"  problem: {problem}" for problem in self.problems])

    def _line_of(self, scheme: str) -> str:
        """Say in which layers an addition acts."""
        parts = [addition for addition in self.additions if addition.scheme == scheme]
        neutral = [str(addition.layer) for addition in parts if not addition.acts]
        line = f"{scheme}: acts in {len(parts) - len(neutral)}/{len(parts)} layers"
        return line + (f"; neutral in layer {', '.join(neutral)}" if 0 < len(neutral) < len(parts) else "")


@torch.no_grad()
def verify(model: PreTrainedModel, *, length: int | None = None, seed: int = 0) -> Report:
    """Reverse the positions under a patched model and report whether each layer and the whole model respond.

    `verify` runs each layer again on the same hidden states, and changes only its positions. So a response cannot leak
    from one layer to the next. If the scheme changes attention scores, `verify` first compares attention without the
    scheme with the model's own eager attention. What a scheme adds to the positions of a layer is left out once, which
    shows whether it acts or is neutral; a neutral start is no problem.

    It takes about six short forward passes, and up to eight more if a layer ignores close positions, or an addition
    changes nothing there. Parameters, mode and caches stay as they were.

    Args:
        model: a patched model, on any device, in any mode. The layers of a PEFT adapter around it take part.
        length: number of tokens; None means 16, or fewer if the scheme has fewer positions.
        seed: seed of the tokens and of the random parameters.

    Returns:
        A report, which is true if every layer behaves as the scheme says.

    Raises:
        NotPatchedError: if the model is not patched.
        UnsupportedModelError: if it is wrapped (DistributedDataParallel), sharded (FSDP) or offloaded.
        ValueError: if `length` is under 4 or exceeds the number of positions of the scheme; also what the model's own
            forward pass raises.
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
    tokens = torch.randint(weight.shape[0], (1, _number_of_tokens(length, patch.limit)), generator=generator).to(
        weight.device
    )
    with evaluation(model), _allow_stock_attention(base.modules.decoder):
        attends = patch.attends and base.config._attn_implementation == NAME
        errors, leftover = _self_test(base, tokens) if attends else ({}, {})
        expected, input_must_respond = _expected_responses(patch, base), _expects_response_at_input(patch, base)
        current = _Measurement(base, _additions(patch, base), tokens)
        trial = _measure_with_random_parameters(
            current, base, patch.limit, tokens, expected, input_must_respond, generator
        )
        order_response = _change(
            _output(base.model, _swap_first_two(tokens, weight.shape[0]))[:, -1], current.output[:, -1]
        )
    layers = tuple(
        LayerReport(i, response, live, expected[i])
        for i, (response, live) in enumerate(zip(current.layers, trial.layers, strict=True))
    )
    additions = _reports_of_additions(patch, current, trial, base.model.dtype)
    problems = [
        *_problems_of_attention(patch, base, errors, leftover),
        *_problems_of_layers(layers),
        *_problems_of_input(input_must_respond, current.input, trial.input),
        *_problems_of_rotation(patch, base),
        *_missing_additions(patch, base),
        *(addition.problem for addition in additions if addition.problem),
    ]
    return Report(patch.name, layers, current.input, current.model, order_response, tuple(problems), additions)


def _number_of_tokens(wanted: int | None, limit: int | None) -> int:
    """Return the number of tokens to use; ValueError if it is under 4 or above `limit`."""
    if limit is not None and limit < 4:
        raise ValueError(f"verify needs 4 positions, and the scheme has {limit}")
    if wanted is None:
        return 16 if limit is None else min(16, limit)
    if wanted < 4 or (limit is not None and wanted > limit):
        raise ValueError(f"length must be at least 4{'' if limit is None else f' and at most {limit}'}, not {wanted}")
    return wanted


def _swap_first_two(tokens: Tensor, vocabulary: int) -> Tensor:
    """Swap the first two tokens. If they are equal, replace the first one instead."""
    swapped = tokens.clone()
    swapped[0, [0, 1]] = swapped[0, [1, 0]]
    if swapped.equal(tokens):
        swapped[0, 0] = (swapped[0, 0] + 1) % vocabulary
    return swapped


def _measure_with_random_parameters(
    current: _Measurement,
    base: BaseModel,
    limit: int | None,
    tokens: Tensor,
    expected: list[bool],
    input_must_respond: bool,
    generator: torch.Generator,
) -> _Measurement:
    """Return the responses with random parameters. Move positions apart until every expected response appears.

    An addition is expected to change something.

    Args:
        current: the responses with the current parameters.
        base: the model.
        limit: number of positions of the scheme, or None if there is no limit.
        tokens: (1, T).
        expected: whether each layer must respond.
        input_must_respond: whether the hidden states that enter the first layer must respond.
        generator: generator of the random parameters.
    """
    trial = current
    owners = [module for module in base.model.modules() if isinstance(module, PositionModule)]
    responses = [*current.layers, *current.additions.values()]
    if min(responses) <= NOTICES and any(True for owner in owners for _ in owner.parameters()):
        with _random_parameters(owners, generator):
            trial = current.again(tokens)
    for span in SPANS:
        if trial.input > NOTICES or not input_must_respond:
            wanted = [response for response, wanted in zip(trial.layers, expected, strict=True) if wanted]
            if all(response > NOTICES for response in (*wanted, *trial.additions.values())):
                break
        step = (min(span, limit or span) - 1) // (tokens.shape[1] - 1)
        with _random_parameters(owners, generator):
            trial = trial.maximum(current.again(tokens, step))
    return trial


def _problems_of_attention(
    patch: Patch, base: BaseModel, errors: dict[int, float], leftover: dict[int, float]
) -> Iterator[str]:
    """Yield the problems of attention.

    Args:
        patch: the patch of the model.
        base: the model.
        errors: layer index -> relative error of attention without the scheme, from `_self_test`.
        leftover: layer index -> response of attention without the scheme, from `_self_test`.
    """
    for index, error in errors.items():
        yield (
            f"layer {index}: attention without the scheme differs from the model's own eager attention by {error:.1%}: "
            "a feature of the model's attention is missing"
        )
    for index, response in leftover.items():
        yield (
            f"layer {index}: attention without the scheme answers to positions, by {response:.1%}: the base's own "
            "positions are still in it"
        )
    if patch.attends and (backend := base.config._attn_implementation) != NAME:
        yield f"{patch.name} needs the attention {NAME!r}, but the config says {backend!r}: the scheme is not applied"


def _problems_of_layers(layers: Sequence[LayerReport]) -> Iterator[str]:
    """Yield the layers whose response contradicts the scheme."""
    for layer in layers:
        if not layer.ok:
            does = "ignores positions" if layer.expected else "answers to positions that it should not see"
            yield f"layer {layer.index} {does}"


def _problems_of_input(input_must_respond: bool, current: float, trial: float) -> Iterator[str]:
    """Yield the problems of the hidden states that enter the first layer.

    Args:
        input_must_respond: whether they must respond to positions.
        current: their response with the current parameters.
        trial: their response with random parameters.
    """
    if input_must_respond and trial <= NOTICES:
        yield "the hidden states that enter the first layer ignore positions"
    if not input_must_respond and current > NOTICES:
        yield "the hidden states that enter the first layer answer to positions: the base's own table is still there"


def _problems_of_rotation(patch: Patch, base: BaseModel) -> Iterator[str]:
    """Yield the problems of the rotation of queries and keys."""
    replacing = _replacing(patch)
    silenced = bool(replacing) and all(
        scheme.layers is None and not scheme.acts_on.rotations(scheme) for scheme in replacing
    )
    if silenced and base.modules.rotary is not None and not isinstance(base.modules.rotary, IdentityRotary):
        yield "queries and keys are rotated: the base's own rotary embedding is still there"
    for scheme in patch.schemes:
        for layer in _wrongly_rotated(scheme, base):
            yield f"layer {layer}: another rotation than that of {scheme.name} turns queries and keys"


def _replacing(patch: Patch) -> list[Scheme]:
    """Return the schemes that replace the positions of their layers."""
    return [scheme for scheme in patch.schemes if not scheme.acts_on.joins()]


def _missing_additions(patch: Patch, base: BaseModel) -> Iterator[str]:
    """Yield the layers that lack what a scheme adds to their positions."""
    found = _additions(patch, base)
    for scheme in patch.schemes:
        for layer in base.layers_of(scheme) if scheme.acts_on.joins() else ():
            if (scheme.name, layer) not in found:
                yield f"layer {layer}: the module of {scheme.name} is missing"


def _additions(patch: Patch, base: BaseModel) -> dict[tuple[str, int], nn.Module]:
    """Return (name of a scheme, index of a layer) -> the module that adds the scheme to the layer's positions."""
    found = {}
    for scheme in patch.schemes:
        for layer in base.layers_of(scheme) if scheme.acts_on.joins() else ():
            additions = base.modules.attention_of[layer]._modules.get("posenc_additions")
            module = getattr(additions, scheme.name, None)  # PEFT's wrapper hands on the module that is active
            if isinstance(module, nn.Module):
                found[scheme.name, layer] = module
    return found


def _reports_of_additions(
    patch: Patch, current: _Measurement, trial: _Measurement, dtype: torch.dtype
) -> tuple[AdditionReport, ...]:
    """Say what each addition does in each of its layers.

    Args:
        patch: the patch of the model.
        current: the responses with the current parameters.
        trial: the responses with random parameters and distant positions.
        dtype: dtype of the model.
    """
    rounding = max(torch.finfo(dtype).eps, 64 * torch.finfo(torch.float32).eps)
    acts_from = {scheme.name: scheme.acts_from for scheme in patch.schemes}
    reports = []
    for (name, layer), module in current.modules.items():
        response, live = current.additions[name, layer], trial.additions[name, layer]
        is_trained = any(True for _ in owner_of(module).parameters())
        problem = ""
        if (name, layer) not in current.reached:
            problem = f"layer {layer}: the module of {name} never runs"
        elif live <= NOTICES and is_trained and acts_from[name] < SPANS[-1]:
            problem = f"layer {layer}: {name} changes nothing, whatever its parameters are"
        reports.append(AdditionReport(name, layer, response, live, response > rounding, problem))
    return tuple(reports)


def _expected_responses(patch: Patch, base: BaseModel) -> list[bool]:
    """Return whether each layer must respond to its positions."""
    stock_responds = base.family.always_replaced and base.own_scheme(tuple(base.sizes)) is not None
    expected = [stock_responds or rotated for rotated in base.rotated]  # of layers without a scheme
    for scheme in sorted(patch.schemes, key=lambda scheme: scheme.acts_on.joins()):
        for layer in base.layers_of(scheme):
            kept = expected[layer] and scheme.acts_on.joins()
            expected[layer] = kept or scheme.acts_on.answers(layer, base)
    return expected


def _expects_response_at_input(patch: Patch, base: BaseModel) -> bool:
    """Return whether the hidden states that enter the first layer must respond to positions."""
    keeps_table = all(scheme.layers is not None for scheme in _replacing(patch))
    table = base.modules.position_table
    # PEFT may have put a wrapper around a table of this package.
    if keeps_table and table is not None and not any(isinstance(part, PositionEmbedding) for part in table.modules()):
        return True
    return any(scheme.acts_on.answers_at_input(base) for scheme in patch.schemes)


def _wrongly_rotated(scheme: Any, base: BaseModel) -> list[int]:
    """Return the layers of a scheme whose rotary module is not of the class that the scheme builds."""
    if None not in scheme.acts_on.rotations(scheme):  # no rotation, or one that transformers' modules compute
        return []
    with torch.device("meta"):
        rotation_class = type(scheme.build(base.rotation.dims))
    wrong = []
    for layer in base.layers_of(scheme):
        for holder in (base.modules.layers[layer], base.modules.attention_of[layer]):
            if (reference := getattr(holder, STATE, OnLayer()).rotation) is not None:
                rotary = reference()
                break
        else:
            rotary = base.modules.rotary
        if rotary is None or not any(isinstance(module, rotation_class) for module in rotary.modules()):
            wrong.append(layer)
    return wrong


class _Measurement:
    """Responses of the model, its input and its layers to reversed positions, with the current parameters.

    `additions` are the responses of layers to the absence of an addition, and `reached` those additions that ran.
    """

    def __init__(
        self, base: BaseModel, modules: dict[tuple[str, int], nn.Module], tokens: Tensor, step: int = 1
    ) -> None:
        """Measure with neighbouring tokens `step` positions apart; `modules` are the `_additions`."""
        self.base, self.modules = base, modules
        self.additions: dict[tuple[str, int], float] = {}
        self.reached: set[tuple[str, int]] = set()
        model, layers = base.model, base.modules.layers
        forward = torch.arange(tokens.shape[1], device=tokens.device)[None] * step
        inputs, self.output = _trace(model, layers, tokens, forward)
        reversed_inputs, reversed_output = _trace(model, layers, tokens, forward.flip(-1))
        self.model = _change(reversed_output, self.output)
        self.input = _change(reversed_inputs[0].hidden_states, inputs[0].hidden_states)
        self.layers = []
        for index, (layer, call, reversed_call) in enumerate(zip(layers, inputs, reversed_inputs, strict=True)):
            original = first(layer(call.hidden_states, *call.args, **call.kwargs))
            for key in (key for key in modules if key[1] == index):
                kwargs = {**call.kwargs, **_borrowed(base.family, call)}
                with self._left_out(key):
                    without = first(layer(call.hidden_states, *call.args, **kwargs))
                self.additions[key] = _change(without, original)
            reversed_kwargs = {**reversed_call.kwargs, **_borrowed(base.family, call)}
            changed = first(layer(call.hidden_states, *reversed_call.args, **reversed_kwargs))
            self.layers.append(_change(changed, original))

    def again(self, tokens: Tensor, step: int = 1) -> _Measurement:
        """Return another measurement of the same model."""
        return _Measurement(self.base, self.modules, tokens, step)

    @contextmanager
    def _left_out(self, key: tuple[str, int]) -> Iterator[None]:
        """Let an addition return the call that it gets, and record that it ran."""

        def skip(module: nn.Module, args: tuple[Any, ...], changed: object) -> Any:
            self.reached.add(key)
            return args[0]

        hook = self.modules[key].register_forward_hook(skip)
        try:
            yield
        finally:
            hook.remove()

    def maximum(self, other: _Measurement) -> _Measurement:
        """Return the larger response of two measurements, for the input, each layer and each addition."""
        maximum = copy.copy(self)
        maximum.input = max(self.input, other.input)
        maximum.layers = [max(pair) for pair in zip(self.layers, other.layers, strict=True)]
        maximum.additions = {key: max(response, other.additions[key]) for key, response in self.additions.items()}
        return maximum


def _borrowed(family: Family, call: LayerCall) -> dict[str, Any]:
    """Return a copy of the keys and values that a layer borrowed, so that another call differs only in positions."""
    name = family.names.layer_lends
    return {} if name is None else {name: copy.copy(call.kwargs[name])}


def _allowed_error(dtype: torch.dtype) -> float:
    """Return the relative error that rounding explains, in this dtype, or in float32 if that is coarser."""
    return max(torch.finfo(each).eps for each in (dtype, torch.float32)) ** 0.5


def _self_test(base: BaseModel, tokens: Tensor) -> tuple[dict[int, float], dict[int, float]]:
    """Compare attention without a scheme with the model's own eager attention, and with itself at reversed positions.

    Only the first comparison shows a feature of the base that our attention function leaves out. A stock attention that
    bypasses transformers' interface is replaced; its own forward then serves as the eager attention. The second
    comparison shows positions of the base that patching has not removed.

    Returns:
        errors: layer index -> relative error against the eager attention, for the layers that differ.
        leftover: layer index -> relative change at reversed positions, for the layers that respond and must not.
    """
    attentions: dict[int, Any] = base.modules.attention_of
    model, family = base.model, base.family
    order = torch.arange(tokens.shape[1], device=tokens.device)[None]
    calls, _ = _trace(model, list(attentions.values()), tokens, order)
    reversed_calls, _ = _trace(model, list(attentions.values()), tokens, order.flip(-1))
    silenced = base.layers_with_scores()
    errors, leftover = {}, {}
    for (index, attention), call, other in zip(attentions.items(), calls, reversed_calls, strict=True):
        hidden, args, kwargs = call.hidden_states, call.args, call.kwargs
        blank = hidden.new_zeros(1, 1, tokens.shape[1], tokens.shape[1])

        def eager_mask(argument: object, blank: Tensor = blank) -> object:
            if not isinstance(argument, Tensor) or argument.ndim != 4:
                return argument
            return positions.read(argument, *blank.shape[-2:]).mask(blank)

        undo = Undo()
        try:
            undo.apply(SetModule(attention, "posenc", WithoutPositions()))
            if "posenc_additions" in attention._modules:
                undo.apply(SetModule(attention, "posenc_additions", Additions()))
            # The eager attention has only the base's own window, and only the rotation that the layer hands over.
            window = family.attention and family.attention.window(attention)
            stock = {"engine": "reference", "window": window, "kept_first": 0, "rotation": None}
            undo.apply(Keep(attention, on_attention, stock))
            plain = first(attention(hidden, *args, **kwargs))
            reversed_kwargs = named(attention, other.args, other.kwargs) if family.always_replaced else other.kwargs
            # The residual holds positions, but comes from outside the attention.
            if residual := family.attention and family.attention.residual:
                reversed_kwargs = {**reversed_kwargs, residual: named(attention, args, kwargs)[residual]}
            reversed_kwargs = {**reversed_kwargs, **_borrowed(family, call)}
            reversed_args = () if family.always_replaced else other.args
            response = _change(first(attention(hidden, *reversed_args, **reversed_kwargs)), plain)
            if index in silenced and response > NOTICES:
                leftover[index] = response
            undo.apply(SetAttribute(attention.config, "_attn_implementation_internal", "eager"))
            if family.always_replaced:
                arguments = named(attention, args, kwargs)
                mask = eager_mask(as_channel(arguments["attention_mask"], as_bool=family.mask_as_bool))
                eager = stock_output(attention, hidden, {**arguments, "attention_mask": mask})
            else:
                masked = {name: eager_mask(argument) for name, argument in kwargs.items()}
                eager = first(attention(hidden, *(eager_mask(argument) for argument in args), **masked))
        finally:
            undo.roll_back()
        error = _change(plain, eager)
        if not error < _allowed_error(hidden.dtype):
            errors[index] = error
    return errors, leftover


def _trace(
    model: PreTrainedModel, layers: list[nn.Module], tokens: Tensor, position_ids: Tensor
) -> tuple[list[LayerCall], Tensor]:
    """Run the model; return the call of each layer, and the output of the model."""
    with recorded(layers) as calls:
        output = _output(model, tokens, position_ids)
    return calls, output


def _output(model: PreTrainedModel, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
    # With a 2-D mask, transformers does not take reversed positions for packed documents.
    arguments: dict[str, Any] = {} if position_ids is None else {"position_ids": position_ids}
    return model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False, return_dict=True, **arguments)[0]


def _change(changed: Tensor, original: Tensor) -> float:
    return ((changed.double() - original.double()).norm() / original.double().norm().clamp(min=1e-30)).item()


@contextmanager
def _allow_stock_attention(decoder: nn.Module) -> Iterator[None]:
    """Let a model run with a stock attention backend, so that `verify` can show that it ignores the scheme."""
    hooks = decoder._forward_pre_hooks
    original = dict(hooks)
    for number, hook in original.items():
        if hook is require_attention:
            del hooks[number]
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(original)


@contextmanager
def _random_parameters(owners: list[PositionModule], generator: torch.Generator) -> Iterator[None]:
    """Draw the parameters of position modules at random; at the end restore the old values bit for bit."""
    parameters = {id(p): p for owner in owners for p in owner.parameters()}.values()
    old_values = [p.detach().clone() for p in parameters]
    try:
        for p in parameters:
            p.copy_(torch.randn(p.shape, generator=generator).to(p) * 0.5)
        yield
    finally:
        for p, old in zip(parameters, old_values, strict=True):
            p.copy_(old)
