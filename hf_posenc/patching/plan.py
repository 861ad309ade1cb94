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
from ..upstream.flash import is_flash
from .check import TAKE_OFF
from .choose_layers import choose_layers, names_of


@dataclass(frozen=True)
class Plan:
    """The schemes that go into a model.

    Attributes:
        base: the model.
        schemes: the schemes, fitted to the base.
        attention: `auto`, or the name of an engine.
    """

    base: BaseModel
    schemes: tuple[Scheme, ...]
    attention: str

    @property
    def attends(self) -> bool:
        """Whether all layers use the attention function of this package. They do if one layer needs it."""
        return needs_our_attention(self.base.family, self.schemes)

    @property
    def backend(self) -> str:
        """The model's flash attention, if it can compute what the schemes make of queries and keys; empty if not."""
        backend = self.base.config._attn_implementation
        has_sinks = any(hasattr(attention, "sinks") for attention in self.base.modules.attentions)  # few kernels do
        fits = self.attends and self.attention == "auto" and not has_sinks and is_flash(backend)
        return backend if fits and keeps_kernel(self.base.family, self.schemes) else ""

    def layers_of(self, scheme: Scheme) -> tuple[int, ...]:
        """Return the indices of a scheme's layers."""
        return self.base.layers_of(scheme)

    @property
    def position_schemes(self) -> tuple[Scheme, ...]:
        """The schemes that replace the positions of their layers."""
        return tuple(scheme for scheme in self.schemes if not scheme.acts_on.joins())

    @property
    def base_layers(self) -> tuple[int, ...]:
        """Indices of the layers with attention whose positions no scheme replaces. They keep the base's positions."""
        replaced_layers = {layer for scheme in self.position_schemes for layer in self.layers_of(scheme)}
        return tuple(layer for layer in self.base.sizes if layer not in replaced_layers)

    @property
    def base_scheme(self) -> Scheme | None:
        """The scheme that computes the base's positions in `base_layers` if their attention is replaced, or None."""
        return self.base.own_scheme(self.base_layers) if self.base_layers and self.base.family.always_replaced else None

    @property
    def rotated_by_base(self) -> tuple[int, ...]:
        """Indices of the layers that the base's rotary module still rotates."""
        layers = [layer for layer in self.base_layers if self.base.rotated[layer]]
        for scheme in self.schemes:
            if scheme.acts_on.leaves_rotation(scheme, self.base):
                layers += self.layers_of(scheme)
        return tuple(sorted(layers))

    @property
    def rotating(self) -> tuple[bool, ...]:
        """For each scheme, whether it rotates queries and keys."""
        return tuple(bool(scheme.acts_on.rotations(scheme)) for scheme in self.schemes)

    @property
    def replaced_attentions(self) -> tuple[int, ...]:
        """Indices of the layers whose attention is replaced by a class that uses transformers' attention interface.

        They are all layers if the family bypasses the interface. If the base has no rotary module, they are the layers
        of rotary schemes.
        """
        if self.base.family.always_replaced:
            return tuple(self.base.sizes)
        if self.base.modules.rotary is not None:
            return ()
        rotating = zip(self.schemes, self.rotating, strict=True)
        return tuple(layer for scheme, rotates in rotating if rotates for layer in self.layers_of(scheme))

    @property
    def needs_one_coordinate(self) -> bool:
        """Whether a layer takes one number per position, in a model whose positions may have several coordinates."""
        if self.base.family.rotation.parameter_coordinates is None:
            return False
        return any(
            scheme.layers is not None or scheme.acts_on.needs_one_coordinate(scheme, self.base)
            for scheme in self.schemes
        )

    @property
    def limit(self) -> int | None:
        """The number of positions that the model can tell apart, or None if there is no limit."""
        limits = [scheme.limit for scheme in self.schemes if scheme.limit is not None]
        if self.base.keeps_table:
            limits.append(self.base.config.max_position_embeddings)
        return min(limits, default=None)


def needs_our_attention(family: Family, schemes: Sequence[Scheme]) -> bool:
    """Return whether a model needs the attention function of this package.

    Args:
        family: the model's family.
        schemes: the model's schemes.
    """
    carrier: Carrier = family
    return family.always_replaced or any(scheme.acts_on.needs_our_attention(scheme, carrier) for scheme in schemes)


def keeps_kernel(family: Family, schemes: Sequence[Scheme]) -> bool:
    """Return whether any kernel can compute the attention of a model, since its schemes change queries and keys only.

    Args:
        family: the model's family.
        schemes: the model's schemes.
    """
    return not family.always_replaced and all(
        scheme.acts_on.keeps_kernel(scheme) or not scheme.acts_on.needs_our_attention(scheme, family)
        for scheme in schemes
    )


def make_plan(model: PreTrainedModel, schemes: Sequence[Scheme], attention: str) -> Plan:
    """Fit schemes to a model, and check that the model can carry them. The model stays unchanged.

    Args:
        model: a stock model, with or without head.
        schemes: the schemes to put in, each into its layers.
        attention: `auto`, or the name of an engine.

    Raises:
        UnsupportedModelError: if the model or one of its settings cannot carry a scheme, or somebody has replaced the
            forward of an attention that has to carry one.
        TypeError: if `layers`, `window` or `sinks` is of a wrong type.
        ValueError: if hyper-parameters do not fit the model, or two schemes name one layer.
    """
    base = BaseModel.of(model)
    chosen = choose_layers(schemes, base)
    check_engine(attention)
    replaced_layers = {layer for scheme in chosen if not scheme.acts_on.joins() for layer in base.layers_of(scheme)}
    base = replace(base, keeps_table=base.has_table and len(replaced_layers) < base.num_layers)
    plan = Plan(base, tuple(scheme.acts_on.fit(scheme, base) for scheme in chosen), attention)
    _check_lenders(plan)
    _check_factors(plan)
    _check_reach(plan)
    for scheme in sorted(plan.schemes, key=lambda scheme: scheme.acts_on.keeps_kernel(scheme)):
        if needs_our_attention(base.family, [scheme]):
            name = scheme.name + ("" if scheme.window is None else " with a window")
            base.require_our_attention(name, keeps_kernel=bool(plan.backend))
    if attention != "auto" and not plan.attends:
        raise ValueError(
            f"{names_of(chosen)} keeps the model's own attention; attention={attention!r} needs a scheme that "
            "attends through hf_posenc"
        )
    _check_forwards(plan)
    return plan


def _check_lenders(plan: Plan) -> None:
    """Raise UnsupportedModelError if a layer borrows keys that are rotated otherwise than its queries."""
    # layer -> the scheme that rotates it, True for the base's rotary module; absent if nothing does
    rotated_by: dict[int, Scheme | bool] = dict.fromkeys(plan.rotated_by_base, True)
    for scheme, rotates in zip(plan.schemes, plan.rotating, strict=True):
        rotated_by |= {layer: scheme for layer in plan.layers_of(scheme) if rotates and layer not in rotated_by}
    for layer, lender in plan.base.lenders.items():
        if rotated_by.get(layer) is not rotated_by.get(lender):
            raise UnsupportedModelError(
                f"layer {layer} of {plan.base.name} takes its keys from layer {lender}, which would be rotated "
                f"differently from its queries: name layers {lender} and {layer} together"
            )


def _check_factors(plan: Plan) -> None:
    """Check that no scheme changes queries that the base already multiplies by a factor of the position.

    Two factors would multiply, and a norm would divide the base's factor out.

    Raises:
        UnsupportedModelError: if one does.
    """
    scaled = set(plan.base.scaled_by_position)
    for scheme, rotates in zip(plan.schemes, plan.rotating, strict=True):
        if not rotates and not scheme.acts_on.joins():
            scaled -= set(plan.layers_of(scheme))  # the scheme silences the factor
    for scheme in plan.schemes:
        if scheme.acts_on.scales_queries() and (both := sorted(scaled.intersection(plan.layers_of(scheme)))):
            raise UnsupportedModelError(
                f"{scheme.name}: {plan.base.name} itself multiplies the queries of layer {', '.join(map(str, both))} "
                "by a factor that grows with the position, which does not go together with it: name other layers"
            )


def _check_reach(plan: Plan) -> None:
    """Raise ValueError if a scheme would only act beyond the last position."""
    for scheme in plan.schemes:
        if plan.limit is not None and scheme.acts_from > plan.limit:
            raise ValueError(
                f"{scheme.name} would change nothing: it acts from {scheme.acts_from} tokens on, and the model has "
                f"{plan.limit} positions. Set a smaller length for it, or combine it with a scheme that has no limit"
            )


def _check_forwards(plan: Plan) -> None:
    """Check that no attention has a replaced forward that would bypass a scheme.

    Raises:
        UnsupportedModelError: if somebody has.
    """
    found = plan.base.modules
    replaced = plan.replaced_attentions
    for index, attention in found.attention_of.items():
        if index not in replaced and not plan.attends:
            continue
        has_class_forward = has_own_forward(attention)
        if not has_class_forward and index not in replaced and "_hf_hook" in attention.__dict__:
            old_forward = attention.__dict__.get("_old_forward")  # accelerate's hook calls it
            has_class_forward = getattr(old_forward, "__func__", None) is type(attention).forward
        if not has_class_forward:
            raise UnsupportedModelError(
                f"the attention of layer {index} has a forward of its own ({attention.__dict__['forward']!r:.80}), "
                f"which would bypass {names_of(plan.schemes)}: take it off ({TAKE_OFF}), patch the model, and put it "
                "on again"
            )
