"""The plan of a patch: which scheme goes into which layer, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..families.base import Family
from ..live.base_model import BaseModel
from ..live.undo import has_own_forward
from ..placement import Carrier
from ..schemes.base import Scheme
from ..upstream.attention import check_engine
from .check import TAKE_OFF
from .choose_layers import choose_layers, names_of


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

    @property
    def own(self) -> Scheme | None:
        """What the base does in layers that nobody names, where their attention is replaced all the same."""
        return self.base.own_scheme(self.kept) if self.kept and self.base.family.always_replaced else None

    @property
    def rotated_by_base(self) -> tuple[int, ...]:
        """The layers that the base's own rotary module goes on turning."""
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

    @property
    def limit(self) -> int | None:
        """The number of positions that exist, or None if there is no limit."""
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
        UnsupportedModelError: if the model or one of its settings cannot carry a scheme, or somebody has replaced a
            forward that would have to carry it.
        TypeError: if `layers` or `window` is of a wrong type.
        ValueError: if hyper-parameters do not fit the model, or two schemes name one layer.
    """
    base = BaseModel.of(model)
    chosen = choose_layers(schemes, base)
    check_engine(attention)
    named = {layer for scheme in chosen for layer in base.layers_of(scheme)}
    base = replace(base, keeps_table=base.has_table and len(named) < base.num_layers)
    plan = Plan(base, tuple(scheme.acts_on.fit(scheme, base) for scheme in chosen), attention)
    _check_lenders(plan)
    for scheme in plan.schemes:
        if needs_own_attention(base.family, [scheme]):
            base.require_own_attention(scheme.name + ("" if scheme.window is None else " with a window"))
    if attention != "auto" and not plan.attends:
        raise ValueError(
            f"{names_of(chosen)} keeps the model's own attention; attention={attention!r} can be chosen for schemes "
            "that change scores only"
        )
    _check_forwards(plan)
    return plan


def _check_lenders(plan: Plan) -> None:
    """Raise UnsupportedModelError if a layer would turn its queries otherwise than the keys that it borrows."""
    turned_by: dict[int, Scheme | bool] = dict.fromkeys(plan.rotated_by_base, True)
    for scheme, rotates in zip(plan.schemes, plan.rotating, strict=True):
        turned_by |= {layer: scheme for layer in plan.layers_of(scheme) if rotates and layer not in turned_by}
    for layer, lender in plan.base.lenders.items():
        if turned_by.get(layer) is not turned_by.get(lender):
            raise UnsupportedModelError(
                f"layer {layer} of {plan.base.name} takes its keys from layer {lender}, which would be rotated "
                f"otherwise than its queries: name layers {lender} and {layer} together"
            )


def _check_forwards(plan: Plan) -> None:
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
                f"which {names_of(plan.schemes)} would not reach: take it off ({TAKE_OFF}), patch the model, and put "
                "it on again"
            )
