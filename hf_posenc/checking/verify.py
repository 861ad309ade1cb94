"""verify(model): change the positions under a patched model and report which layers respond."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..core.attention_call import Call
from ..core.errors import NotPatchedError
from ..core.layer_state import STATE, OnLayer, on_attention, on_decoder
from ..core.modules import Additions, PositionEmbedding, PositionModule, WithoutPositions, owner_of, query_modules
from ..core.positions import Positions, read
from ..engines import reference
from ..model.base_model import BaseModel
from ..model.patch_record import Patch, patch_of
from ..model.undo import Keep, SetAttribute, SetModule, Undo
from ..model.watch import LayerCall, recorded
from ..transformers_glue import NAME
from ..transformers_glue.positions_in_mask import as_channel
from ..transformers_glue.replaced_attention import named, stock_output
from ..transformers_glue.rotary import IdentityRotary
from .runner import Runner, again, change, trial, unwrapped

NOTICES = 1e-7
"""Relative change above which a layer responds. A layer that ignores positions repeats its arithmetic: change 0."""

SPANS = (2**8, 2**12, 2**16, 2**20)
"""Numbers of positions over which to spread the tokens, in this order, until every expected layer responds."""

ROWS = 3
"""Number of queries that an attention gets at a time, to see whether they read each other."""

PADDING = 2
"""Number of padding tokens in front of a call, to see whether it reads them."""


@dataclass(frozen=True)
class LayerReport:
    """The response of one decoder layer when only its positions change.

    Attributes:
        index: index of the layer.
        response: relative change of the layer's output, with the model's current parameters.
        live_response: the same if all layers respond that should. Otherwise the largest change, also with random
            parameters of the scheme and positions further and further apart, until they respond. A scheme that starts
            neutral (DA-Transformer) needs random parameters. A scheme that acts from 8192 tokens on needs distant
            positions. A dead scheme never responds.
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
        live_response: as in `LayerReport`.
        acts: whether `response` is more than rounding. If not, the addition is neutral at the tokens of the probe.
    """

    scheme: str
    layer: int
    response: float
    live_response: float
    acts: bool


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
        lines += [f"  {'model':<10} {self.model_response:>10.2e}", f"  {'order':<10} {self.order_response:>10.2e}"]
        for name in dict.fromkeys(addition.scheme for addition in self.additions):
            acts = [addition.acts for addition in self.additions if addition.scheme == name]
            lines.append(f"  adds       {name}: acts in {sum(acts)}/{len(acts)} layers")
        return "\n".join(lines + [f"  problem: {problem}" for problem in self.problems])


@torch.no_grad()
def verify(model: PreTrainedModel, *, length: int | None = None, seed: int = 0) -> Report:
    """Reverse the positions under a patched model and report whether each layer and the whole model respond.

    `verify` runs each layer again on the same hidden states, and changes only its positions. So a response cannot leak
    from one layer to the next. If the scheme changes attention scores, `verify` first compares attention without the
    scheme with the model's own eager attention. What a scheme adds to the positions of a layer is left out once, which
    shows whether it acts or is neutral; a neutral start is no problem. Each attention is also computed a few queries at
    a time, and behind padding, which must change nothing.

    It takes about eight short forward passes, and up to eight more if a layer ignores close positions, or an addition
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
    model = unwrapped(model, "verify the model")
    patch = patch_of(model)
    if patch is None:
        raise NotPatchedError(f"this {type(model).__name__} is not patched: there is nothing to verify")
    length = min(16, patch.limit or 16) if length is None else length
    if not 4 <= length <= (patch.limit or length):
        raise ValueError(
            f"verify takes 4 or more positions, at most as many as the scheme has ({patch.limit}), not {length}"
        )
    with trial(model):
        return _Verification(BaseModel.of(model), patch, length, seed).report()


_Responses = dict[Any, float]
"""Responses to reversed positions: of the `model`, of its `input`, and of each layer, by its index. Also of a layer to
the absence of an addition, by (name of the scheme, index of the layer)."""


def _moved(call: LayerCall, other: LayerCall) -> LayerCall:
    """Return a call at the positions of another one, with its own hidden states: of some families they are several."""
    shape = call.hidden_states.shape

    def pick(own: object, theirs: object) -> object:
        if not isinstance(own, Tensor) or own.ndim < 3 or not own.is_floating_point():
            return theirs
        return own if (own.shape[:2], own.shape[-1]) == (shape[:2], shape[-1]) else theirs

    kwargs = {name: pick(call.kwargs[name], each) for name, each in other.kwargs.items()}
    return LayerCall(call.hidden_states, tuple(map(pick, call.args, other.args)), kwargs)


class _Verification:
    """The measurements of `verify` on one model, within a `trial`."""

    def __init__(self, base: BaseModel, patch: Patch, length: int, seed: int) -> None:
        """Let the model run with a stock attention backend, and at reversed positions."""
        self.base, self.patch, self.family = base, patch, base.family
        self.runner = Runner(base.model, seed)
        self.tokens = self.runner.tokens(length)
        self.owners = [module for module in base.model.modules() if isinstance(module, PositionModule)]
        # Of each addition its module; None where it is missing. PEFT's wrapper hands on the module that is active.
        self.additions: dict[tuple[str, int], Any] = {}
        for scheme in patch.schemes:
            for layer in base.layers_of(scheme) if scheme.joins and not scheme.computes_scores else ():
                holder = base.modules.attention_of[layer]._modules.get("posenc_additions")
                self.additions[scheme.name, layer] = getattr(holder, scheme.name, None)
        self.modules = {key: module for key, module in self.additions.items() if module is not None}
        self.replacing = [scheme for scheme in patch.schemes if not scheme.joins]
        self.reached: set[tuple[str, int]] = set()
        decoder = base.modules.decoder
        setattr(decoder, STATE, replace(on_decoder(decoder), ordered=False, attends=False))
        for attention in base.modules.attentions:
            setattr(attention, STATE, replace(on_attention(attention), ordered=False))

    def report(self) -> Report:
        """Measure everything."""
        patch, base = self.patch, self.base
        backend, problems = base.config._attn_implementation, []
        attends = patch.attends and backend == NAME
        if attends:
            problems += self.differences()
        elif patch.attends:
            problems.append(f"{patch.name} needs the attention {NAME!r}, but the config says {backend!r}: not applied")
        expected, input_expected = self.expected(), self.input_expected()
        wanted = [*self.modules, *(layer for layer, responds in enumerate(expected) if responds)]
        current = self.measured()
        live = self.live(current, [*wanted, "input"] if input_expected else wanted)
        problems += self.crossings() if attends else []
        swapped = self.tokens.clone()
        swapped[0, [0, 1]] = swapped[0, [1, 0]]
        if swapped.equal(self.tokens):
            swapped[0, 0] = (swapped[0, 0] + 1) % self.runner.vocabulary
        order = change(*(self.runner.at(each, None)[:, -1] for each in (swapped, self.tokens)))
        layers = tuple(LayerReport(index, current[index], live[index], each) for index, each in enumerate(expected))
        words = {True: "ignores positions", False: "answers to positions that it should not see"}
        problems += [f"layer {layer.index} {words[layer.expected]}" for layer in layers if not layer.ok]
        entering = "the hidden states that enter the first layer"
        if input_expected and live["input"] <= NOTICES:
            problems.append(f"{entering} ignore positions")
        if not input_expected and current["input"] > NOTICES:
            problems.append(f"{entering} answer to positions: the base's own table is still there")
        problems += [*self.problems_of_rotation(), *self.problems_of_additions(live)]
        rounding = max(torch.finfo(base.model.dtype).eps, 64 * torch.finfo(torch.float32).eps)
        additions = tuple(
            AdditionReport(*key, current[key], live[key], current[key] > rounding) for key in self.modules
        )
        return Report(patch.name, layers, current["input"], current["model"], order, tuple(problems), additions)

    def traced(self, modules: list[nn.Module], positions: Tensor) -> tuple[list[LayerCall], Tensor]:
        """Run the model; return the call of each layer or attention, and the output of the model."""
        with recorded(modules) as calls:
            output = self.runner.at(self.tokens, positions)
        return calls, output

    def lent(self, call: LayerCall) -> dict[str, Any]:
        """Return the keys and values that a layer borrowed, so that another call differs only in positions."""
        name = self.family.names.layer_lends
        return {} if name is None else {name: call.kwargs[name]}

    def measured(self, step: int = 1) -> _Responses:
        """Return the responses with neighbouring tokens `step` positions apart."""
        layers, ids = self.base.modules.layers, step * self.runner.positions(self.tokens.shape[1])
        calls, output = self.traced(layers, ids)
        others, reversed_output = self.traced(layers, ids.flip(-1))
        found: _Responses = {
            "model": change(reversed_output, output),
            "input": change(others[0].hidden_states, calls[0].hidden_states),
        }
        for index, (layer, call, other) in enumerate(zip(layers, calls, others, strict=True)):
            original = again(layer, call)
            found[index] = change(again(layer, _moved(call, other), **self.lent(call)), original)
            undo, added = Undo(), {key: module for key, module in self.modules.items() if key[1] == index}
            if added:  # by one engine with and without, so that what changes nothing changes no bit
                undo.apply(Keep(self.base.modules.attention_of[index], on_attention, {"engine": "reference"}))
                original = again(layer, call)
            for key, module in added.items():

                def skip(module: nn.Module, args: Any, output: Any, key: tuple[str, int] = key) -> Any:
                    self.reached.add(key)
                    return args[0]

                hook = module.register_forward_hook(skip)
                found[key] = change(again(layer, call), original)
                hook.remove()
            undo.roll_back()
        return found

    def live(self, current: _Responses, wanted: list[Any]) -> _Responses:
        """Return the responses with random parameters. Move positions apart until every wanted response appears."""
        live, length = current, self.tokens.shape[1]
        for span in (length, *SPANS):
            if all(live[key] > NOTICES for key in wanted):
                break
            step = (min(span, self.patch.limit or span) - 1) // (length - 1)
            with self.random_parameters():
                live = {key: max(response, live[key]) for key, response in self.measured(step).items()}
        return live

    @contextmanager
    def random_parameters(self) -> Iterator[None]:
        """Draw the parameters of position modules at random; at the end restore the old values bit for bit."""
        parameters = {id(p): p for owner in self.owners for p in owner.parameters()}.values()
        old_values = [p.detach().clone() for p in parameters]
        try:
            for p in parameters:
                p.copy_(torch.randn(p.shape, generator=self.runner.generator).to(p) * 0.5)
            yield
        finally:
            for p, old in zip(parameters, old_values, strict=True):
                p.copy_(old)

    def expected(self) -> list[bool]:
        """Return whether each layer must respond to its positions."""
        base = self.base
        stock_responds = self.family.always_replaced and base.own_scheme(tuple(base.sizes)) is not None
        scaled = () if self.family.drops_position_ids else base.scaled_by_position
        # Of layers without a scheme.
        expected = [stock_responds or rotated or index in scaled for index, rotated in enumerate(base.rotated)]
        for scheme in sorted(self.patch.schemes, key=lambda scheme: scheme.joins):
            for layer in base.layers_of(scheme):
                kept = expected[layer] and scheme.joins
                expected[layer] = kept or scheme.answers(layer, base)
        return expected

    def input_expected(self) -> bool:
        """Return whether the hidden states that enter the first layer must respond to positions."""
        table = self.base.modules.position_table
        keeps_table = all(scheme.layers is not None for scheme in self.replacing)
        # PEFT may have put a wrapper around a table of this package.
        ours = table is not None and any(isinstance(part, PositionEmbedding) for part in table.modules())
        if keeps_table and table is not None and not ours:
            return True
        return any(scheme.answers_at_input(self.base) for scheme in self.patch.schemes)

    def problems_of_additions(self, live: _Responses) -> Iterator[str]:
        """Yield what is wrong with what schemes add to the positions of their layers."""
        acts_from = {scheme.name: scheme.acts_from for scheme in self.patch.schemes}
        for (name, layer), module in self.additions.items():
            if (name, layer) not in self.reached:
                yield f"layer {layer}: the module of {name} {'is missing' if module is None else 'never runs'}"
            elif live[name, layer] <= NOTICES and acts_from[name] < SPANS[-1] and list(owner_of(module).parameters()):
                yield f"layer {layer}: {name} changes nothing, whatever its parameters are"

    def problems_of_rotation(self) -> Iterator[str]:
        """Yield the problems of the rotation of queries and keys."""
        base, replacing = self.base, self.replacing
        silenced = all(scheme.layers is None and not scheme.rotations() for scheme in replacing)
        if replacing and silenced and not isinstance(base.modules.rotary, IdentityRotary | None):
            yield "queries and keys are rotated: the base's own rotary embedding is still there"
        for scheme in self.patch.schemes:
            if None not in scheme.rotations():  # no rotation, or one that transformers' modules compute
                continue
            buildable: Any = scheme
            with torch.device("meta"):
                rotation_class = type(buildable.build(base.rotation.dims))
            for layer in base.layers_of(scheme):
                holders = (base.modules.layers[layer], base.modules.attention_of[layer])
                references = (getattr(holder, STATE, OnLayer()).rotation for holder in holders)
                reference = next((each for each in references if each is not None), None)
                rotary = base.modules.rotary if reference is None else reference()
                if rotary is None or not any(isinstance(module, rotation_class) for module in rotary.modules()):
                    yield f"layer {layer}: another rotation than that of {scheme.name} turns queries and keys"

    def differences(self) -> list[str]:
        """Compare attention without a scheme with the model's own eager attention, and with itself at other positions.

        Only the first comparison shows a feature of the base that our attention function leaves out. A stock attention
        that bypasses transformers' interface is replaced; its own forward then serves as the eager attention. The other
        comparison shows positions of the base that patching has not removed.
        """
        attentions: dict[int, Any] = self.base.modules.attention_of
        ids = self.runner.positions(self.tokens.shape[1])
        calls, others = (self.traced(list(attentions.values()), each)[0] for each in (ids, ids.flip(-1)))
        family, problems = self.family, list[str]()
        silenced = {i for each in self.replacing if each.computes_scores for i in self.base.layers_of(each)}
        for (index, attention), call, other in zip(attentions.items(), calls, others, strict=True):
            undo = Undo()
            try:
                undo.apply(SetModule(attention, "posenc", WithoutPositions()))
                if "posenc_additions" in attention._modules:
                    undo.apply(SetModule(attention, "posenc_additions", Additions()))
                # The eager attention has only the base's own window, and only the rotation that the layer hands over.
                window = family.attention and family.attention.window(attention)
                stock = {"engine": "reference", "window": window, "kept_first": 0, "rotation": None}
                undo.apply(Keep(attention, on_attention, stock))
                plain, changed = again(attention, call), self.lent(call)
                leftover = change(again(attention, _moved(call, other), **changed), plain)
                undo.apply(SetAttribute(attention.config, "_attn_implementation_internal", "eager"))
                error = change(plain, self.eager_output(attention, call))
            finally:
                undo.roll_back()
            bare = f"layer {index}: attention without the scheme"
            if not error < max(torch.finfo(each).eps for each in (plain.dtype, torch.float32)) ** 0.5:
                missing = "a feature of the model's attention is missing"
                problems.append(f"{bare} differs from the model's own eager attention by {error:.1%}: {missing}")
            if index in silenced and leftover > NOTICES:
                still = "the base's own positions are still in it"
                problems.append(f"{bare} answers to positions, by {leftover:.1%}: {still}")
        return problems

    def eager_output(self, attention: Any, call: LayerCall) -> Tensor:
        """Return what the model's own eager attention returns for a call, with a mask as it takes it."""
        length = self.tokens.shape[1]

        def eager(argument: object) -> object:
            if not isinstance(argument, Tensor) or argument.ndim != 4:
                return argument
            return read(argument, length, length).mask(call.hidden_states.new_zeros(1, 1, length, length))

        if self.family.always_replaced:
            arguments = named(attention, call.args, call.kwargs)
            mask = eager(as_channel(arguments["attention_mask"], as_bool=self.family.mask_as_bool))
            return stock_output(attention, call.hidden_states, {**arguments, "attention_mask": mask})
        kwargs = {name: eager(argument) for name, argument in call.kwargs.items()}
        return again(attention, LayerCall(call.hidden_states, tuple(map(eager, call.args)), kwargs))

    def crossings(self) -> list[str]:
        """Find the layers where a query reads other queries, keys that it does not see, or other tokens' hidden states.

        Each call of a layer's attention is computed whole, then a few queries at a time with no later keys, as engines
        and caches cut it, then behind padding: with the current parameters of the schemes, and with random ones.
        """
        attentions: dict[int, Any] = self.base.modules.attention_of
        # The additions get the call before the positions of the layer do.
        first = {
            index: attention._modules.get("posenc_additions") or attention._modules.get("posenc")
            for index, attention in attentions.items()
        }
        entered = {index: module for index, module in first.items() if not isinstance(module, WithoutPositions | None)}
        with recorded(list(attentions.values())) as states, recorded(list(entered.values())) as recordings:
            self.runner.at(self.tokens, None)
        hidden = dict(zip(attentions, states, strict=True))
        found: dict[tuple[int, str], float] = {}
        for parameters in (nullcontext(), self.random_parameters()):
            with parameters:
                for index, recording in zip(entered, recordings, strict=True):
                    call, numbers = cast(Call, recording.hidden_states), recording.args[0]
                    rounding = max(4 * torch.finfo(call.query.dtype).eps, torch.finfo(torch.float32).eps ** 0.5)
                    compared = _cut_and_padded(attentions[index], call, numbers, hidden[index].hidden_states)
                    for when, whole, other in compared:
                        if (off := change(other, whole)) > max(rounding, found.get((index, when), 0)):
                            found[index, when] = off
        return [
            f"layer {index}: the attention of {self.patch.name} changes by {off:.1%} {when}: a score may read its own "
            "query and the keys that this query sees (`call.visible()`), a number of a token that token's hidden state"
            for (index, when), off in found.items()
        ]


def _cut_and_padded(
    attention: nn.Module, call: Call, numbers: object, hidden_states: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield what is done to a call of an attention, the output for the whole call, and the output after that.

    Args:
        attention: the attention.
        call: the call before anything of the schemes has changed it.
        numbers: (B, H, L, N) for the additions that use numbers of tokens; anything but a tensor for none.
        hidden_states: (B, T, E), from which the numbers were made.
    """
    additions: Any = attention._modules.get("posenc_additions")
    posenc: Any = attention._modules.get("posenc", WithoutPositions())

    def attend(call: Call, keys: slice | Tensor) -> Tensor:
        if additions is not None:
            call = additions(call, numbers[:, :, keys] if isinstance(numbers, Tensor) else None)
        # Widened, the output is not rounded to half precision.
        output: Tensor = posenc(call, lambda call: reference.attend(call.widened()))[0]
        return output

    size = call.query.shape[2]
    whole = attend(call, slice(None))
    rows = [slice(start, start + ROWS) for start in range(0, size, ROWS)]
    cut = [attend(call.cut(some, slice(some.stop)), slice(some.stop)) for some in rows]
    yield f"if queries come {ROWS} at a time, as from a cache", whole, torch.cat(cut, 1)
    made_by = {} if additions is None else additions.token_modules()
    for make in (*made_by.values(), *query_modules(attention).values()):
        made = torch.cat([make(hidden_states[:, some]) for some in rows], 2)
        yield f"if its numbers are made {ROWS} tokens at a time, as beside a cache", make(hidden_states), made
    if isinstance(call.positions, Positions):
        slots = torch.arange(PADDING + size, device=call.query.device)
        order = (slots - PADDING) % size  # the vectors of the last tokens stand for those of padding
        padded, is_token = call.cut(order, order), slots[None] >= PADDING
        changed: dict[str, Any] = {}
        for side in ("query", "key"):
            count = getattr(padded.positions, f"{side}_positions")
            changed |= {f"{side}_positions": torch.where(is_token, count, -1), f"{side}_valid": is_token}
            changed[f"{side}_index"] = slots[None].to(torch.int32)
        padded = replace(padded, positions=replace(padded.positions, **changed))
        yield f"behind {PADDING} padding tokens", whole, attend(padded, order)[:, PADDING:]
