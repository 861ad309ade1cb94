"""The plan of a patch: which scheme goes into which layer, checked before anything is changed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import SupportsIndex

from torch import nn
from transformers import PreTrainedModel

from ..dims import select_layers
from ..errors import UnsupportedModelError
from ..families.base import Family
from ..live.base_model import BaseModel
from ..live.undo import has_own_forward
from ..modules import Native
from ..placement import Carrier
from ..positions import NO_WINDOW
from ..schemes.base import Scheme
from ..upstream.attention import check_engine
from ..upstream.replaced import ReplacedAttention

TAKE_OFF = (
    "hooks of accelerate: accelerate.hooks.remove_hook_from_module(model, recurse=True); a wrapper or a compiled "
    "forward: del attention.forward"
)


@dataclass(frozen=True)
class Plan:
    """The schemes that go into a model.

    Attributes:
        base: the model.
        schemes: fitted to the base.
        attention: `auto` or an engine's name.
    """

    base: BaseModel
    schemes: tuple[Scheme, ...]
    attention: str

    @property
    def attends(self) -> bool:
        """Whether some layer needs the attention function of this package; then all layers attend through it."""
        return needs_own_attention(self.base.family, self.schemes)

    def layers_of(self, scheme: Scheme) -> tuple[int, ...]:
        """Return the indices of a scheme's layers."""
        return self.base.layers_of(scheme)

    @property
    def kept(self) -> tuple[int, ...]:
        """The layers with attention that nobody names, which keep what the base has."""
        named = {layer for scheme in self.schemes for layer in self.layers_of(scheme)}
        return tuple(layer for layer in self.base.sizes if layer not in named)

    def rotated_by_base(self) -> tuple[int, ...]:
        """Return the layers that the base's own rotary module goes on turning."""
        layers = [layer for layer in self.kept if self.base.rotated[layer]]
        for scheme in self.schemes:
            if scheme.acts_on.leaves_rotation(scheme, self.base):
                layers += self.layers_of(scheme)
        return tuple(sorted(layers))

    @property
    def rotating(self) -> tuple[bool, ...]:
        """For each scheme, whether it rotates."""
        return tuple(bool(scheme.acts_on.rotations(scheme)) for scheme in self.schemes)

    @property
    def replaced(self) -> tuple[int, ...]:
        """The layers whose attention is replaced by a class that attends through transformers' interface.

        They are all layers of a base that bypasses it, and the rotating ones of a base without a rotary module.
        """
        if self.base.family.always_replaced:
            return tuple(self.base.sizes)
        rotating = zip(self.schemes, self.rotating, strict=True) if self.base.found.rotary is None else ()
        return tuple(layer for scheme, rotates in rotating if rotates for layer in self.layers_of(scheme))

    @property
    def needs_one_coordinate(self) -> bool:
        """Whether some layer counts positions by one number, in a model whose positions may have several."""
        if self.base.family.rotation.parameter_coordinates is None:
            return False
        return any(
            scheme.layers is not None or scheme.acts_on.needs_one_coordinate(scheme, self.base)
            for scheme in self.schemes
        )

    def resolved(self, native: Native) -> Plan:
        """Return the plan with the choices made that depend on the base's weights."""
        return replace(self, schemes=tuple(scheme.resolve(native, self.base.dims) for scheme in self.schemes))

    def limit(self) -> int | None:
        """Return the number of positions that exist, or None if there is no limit."""
        limits = [scheme.limit for scheme in self.schemes if scheme.limit is not None]
        if self.base.keeps_table:
            limits.append(self.base.config.max_position_embeddings)
        return min(limits, default=None)


def needs_own_attention(family: Family, schemes: Sequence[Scheme]) -> bool:
    """Return whether a model has to attend through the attention function of this package.

    Args:
        family: of the model.
        schemes: that it has.
    """
    carrier: Carrier = family
    return family.always_replaced or any(scheme.acts_on.needs_own_attention(scheme, carrier) for scheme in schemes)


def make_plan(model: PreTrainedModel, schemes: Sequence[Scheme], attention: str) -> Plan:
    """Check that the schemes can be carried by the model; changes nothing.

    Args:
        model: a stock model, with or without head.
        schemes: what to put in, each into its layers.
        attention: `auto` or an engine's name.

    Returns:
        The plan.

    Raises:
        UnsupportedModelError: if the model or one of its settings cannot carry a scheme.
        TypeError: if `layers` or `window` is of a wrong type.
        ValueError: if hyper-parameters do not fit the model, or two schemes name one layer.
    """
    base = BaseModel.of(model)
    types = getattr(base.config, "layer_types", None)
    chosen = [
        replace(
            scheme,
            layers=select_layers(scheme.name, scheme.layers, base.num_layers, types),
            window=_window_of(scheme),
        )
        for scheme in schemes
    ]
    named = _check_layers(chosen, base)
    check_engine(attention)
    base = replace(base, keeps_table=base.has_table and len(named) < base.num_layers)
    plan = Plan(base, tuple(scheme.acts_on.fit(scheme, base) for scheme in chosen), attention)
    for scheme in plan.schemes:
        if needs_own_attention(base.family, [scheme]):
            base.require_own_attention(scheme.name + ("" if scheme.window is None else " with a window"))
    if attention != "auto" and not plan.attends:
        raise ValueError(
            f"{_names(chosen)} keeps the model's own attention; attention={attention!r} can be chosen for schemes that "
            "change scores only"
        )
    return plan


def _names(schemes: Sequence[Scheme]) -> str:
    return " and ".join(scheme.name for scheme in schemes)


def _check_layers(schemes: Sequence[Scheme], base: BaseModel) -> set[int]:
    """Check that each scheme can act in its layers, and return the layers that have one.

    Raises:
        UnsupportedModelError: if a scheme cannot act in a layer, or the base serves all layers or none.
        ValueError: if two schemes name one layer, or a window changes nothing.
    """
    scheme_in: dict[int, Scheme] = {}
    for scheme in schemes:
        possible = scheme.acts_on.possible_layers(base)
        for layer in base.layers_of(scheme):
            if layer not in possible:
                raise UnsupportedModelError(
                    f"{scheme.name}: layer {layer} of {base.name} has no attention, so nothing there has positions: "
                    f"name layers among {', '.join(map(str, possible))}"
                )
            if (other := scheme_in.setdefault(layer, scheme)) is not scheme:
                raise ValueError(
                    f"{other.name} and {scheme.name} both name layer {layer}: give each of them layers of its own, as "
                    "in [Alibi(layers='0::2'), Nope(layers='1::2')]"
                )
        _check_window(scheme, base)
    if base.family.always_replaced and len(scheme_in) < base.num_layers:
        raise UnsupportedModelError(
            f"{_names(schemes)} in some layers: the attention of {base.name} never calls transformers' attention "
            "interface, so that layers which keep what the base has cannot run beside those that are replaced. Give "
            "every layer a scheme"
        )
    return set(scheme_in)


def _window_of(scheme: Scheme) -> int | None:
    """Return a scheme's window as a number of Python; TypeError or ValueError if it is no number of tokens."""
    if scheme.window is None:
        return None
    if isinstance(scheme.window, bool) or not isinstance(scheme.window, SupportsIndex):
        raise TypeError(f"{scheme.name}: window must be a number of tokens or None, not {scheme.window!r}")
    window = operator.index(scheme.window)
    if not 1 <= window < NO_WINDOW:
        raise ValueError(
            f"{scheme.name}: window must be at least 1, the token itself, and below {NO_WINDOW}, not {window}"
        )
    return window


def _check_window(scheme: Scheme, base: BaseModel) -> None:
    """Raise ValueError if a window would change nothing."""
    window = scheme.window
    if window is None:
        return
    for layer in base.layers_of(scheme):
        if (own := base.window_of(layer)) is not None and own <= window:
            raise ValueError(
                f"{scheme.name}: window={window} would change nothing in layer {layer}, which has a sliding window of "
                f"{own} tokens: give a smaller one, or name other layers"
            )


def check_forwards(plan: Plan) -> None:
    """Check that no scheme would be bypassed by a forward that somebody put on an attention.

    Raises:
        UnsupportedModelError: if one would; the message says what to do.
    """
    found = plan.base.found
    replaced = plan.replaced
    for index, attention in found.attention_of.items():
        if index not in replaced and not plan.attends:
            continue
        hooked = has_own_forward(attention)
        if not hooked and index not in replaced and "_hf_hook" in attention.__dict__:  # which calls what it replaced
            behind = attention.__dict__.get("_old_forward")
            hooked = getattr(behind, "__func__", None) is type(attention).forward
        if not hooked:
            raise UnsupportedModelError(
                f"the attention of layer {index} has a forward of its own ({attention.__dict__['forward']!r:.80}), "
                f"which {_names(plan.schemes)} would not reach: take it off ({TAKE_OFF}), patch the model, and put it "
                "on again"
            )


def check_class_undone(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a forward was put on an attention whose class is to be changed back."""
    for name, module in model.named_modules():
        if isinstance(module, ReplacedAttention) and not has_own_forward(module):
            raise UnsupportedModelError(
                f"{name} was given a forward of its own after the model was patched, which would stay: take "
                f"it off ({TAKE_OFF}), then unpatch the model"
            )
