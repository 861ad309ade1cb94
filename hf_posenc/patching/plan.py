"""What is to be done to a model, found out and checked before anything is changed."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from .. import families
from ..errors import UnsupportedModelError
from ..families.base import Family, Resolved, base_model_type, resolve
from ..modes import evaluation
from ..modules import Native
from ..placement import select
from ..positions import NO_WINDOW
from ..registry import family_for
from ..schemes.base import Dims, RotaryScheme, Scheme, by_layer_type
from ..schemes.rope import Rope
from ..upstream.attention import SPLIT_HEADS, check_engine
from ..upstream.replaced import ReplacedAttention
from ..upstream.rotary import ORIGINAL_LENGTH, PartialRotary, make_rotary, own_rotation, scaling_types
from .undo import has_own_forward

TAKE_OFF = (
    "hooks of accelerate: accelerate.hooks.remove_hook_from_module(model, recurse=True); a wrapper or a compiled "
    "forward: del attention.forward"
)


_STANCE = threading.RLock()
"""Held while the stance of torch.compile is changed: all threads share it, and each puts back what it found."""


@dataclass(frozen=True)
class BaseModel:
    """A live model as its family describes it; what a placement may ask of it, see `hf_posenc.placement.Base`.

    Attributes:
        model: with or without head.
        family: what is known of its architecture.
        found: its modules.
        sizes: of the attention of each layer that has one, by the layer's index.
        keeps_table: whether its own table of positions stays, since some layers keep what the base has.
    """

    model: PreTrainedModel
    family: Family
    found: Resolved
    sizes: Mapping[int, Dims]
    keeps_table: bool = False

    @classmethod
    def of(cls, model: PreTrainedModel) -> BaseModel:
        """Look at a model; UnsupportedModelError if its family is not known, or a setting of it is refused."""
        config = model.config
        family = family_for(base_model_type(config))
        found = resolve(family, model)
        sizes = {index: _sizes(family, config, each, len(found.layers)) for index, each in found.attention_of.items()}
        return cls(model, family, found, sizes)

    @property
    def dims(self) -> Dims:
        """Sizes of the attention, in the first layer that has one."""
        return next(iter(self.sizes.values()))

    @property
    def rotary_dims(self) -> Dims:
        """Sizes of what is rotated: heads, or the part of each head that is set apart for rotation."""
        part = self.family.rotary_part
        return self.dims if part is None else replace(self.dims, head_dim=getattr(self.found.attentions[0], part))

    @property
    def rotated(self) -> tuple[bool, ...]:
        """For each layer, whether the base turns its queries and keys."""
        return self.found.rotated

    @property
    def pairs(self) -> str:
        """Which dimensions the base turns together, `half` or `interleaved`."""
        flag = self.family.interleaved_if
        return "interleaved" if flag is not None and getattr(self.config, flag) else self.family.pairs

    @property
    def has_temperature(self) -> bool:
        """Whether queries of all layers are multiplied by a factor that grows with the position."""
        keys = self.family.temperature_keys
        return bool(keys) and bool(self.config.rope_parameters.get(keys[0]))

    def layers_of(self, scheme: Scheme) -> tuple[int, ...]:
        """Return the indices of a fitted scheme's layers; without a selection those in which it can act."""
        assert not isinstance(scheme.layers, str)
        if scheme.layers is not None:
            return scheme.layers
        return tuple(range(len(self.found.layers))) if scheme.acts_on.adds_vectors else tuple(self.sizes)

    @property
    def config(self) -> Any:
        """The model's config."""
        return self.model.config

    @property
    def configs(self) -> list[Any]:
        """The model's config, and those of its attentions: a layer that was copied (copy.deepcopy) has its own."""
        of_attentions = (each.config for each in self.found.attentions if "config" in each.__dict__)
        return list({id(each): each for each in (self.config, *of_attentions)}.values())

    @property
    def name(self) -> str:
        """Stock model type."""
        return base_model_type(self.config)

    @property
    def length(self) -> int | None:
        """The length the base was made for, in tokens, or None if its config does not say."""
        return getattr(self.config, self.family.length, None)

    @property
    def has_table(self) -> bool:
        """Whether positions enter at the input, from a table."""
        return self.found.position_table is not None

    def require_own_attention(self, scheme: str) -> None:
        """Raise UnsupportedModelError if the attention function of this package cannot compute the attention."""
        if (self.model.tp_size or 1) > 1:
            raise UnsupportedModelError(f"{scheme}: {SPLIT_HEADS}")
        backend = self.config._attn_implementation or "eager"
        if "flash" in backend or "paged" in backend:
            raise UnsupportedModelError(
                f"{scheme} changes attention scores, which {backend} cannot carry: load the model with "
                'attn_implementation="sdpa" or "eager" first'
            )

    def fit_rotation(self, scheme: RotaryScheme) -> RotaryScheme:
        """Return the scheme with all that was not given taken from the base, once its angles can be computed."""
        if self.found.rotary is None and self.family.split_heads is None:
            raise UnsupportedModelError(
                f"{scheme.name}: this {self.name} rotates nothing, and its attention makes queries and keys where no "
                "rotation can be put"
            )
        if self.found.rotary is not None and scheme.pairs not in (None, self.pairs):
            by = "halves" if self.pairs == "half" else "neighbouring dimensions"
            raise UnsupportedModelError(
                f"{scheme.name}: {self.name} rotates by {by} in its own code, so layout={scheme.pairs!r} cannot be "
                "had: the rows of its query and key projections would have to be reordered"
            )
        if self.family.rotates is not None and scheme.layers is not None:
            still = [layer for layer in self.layers_of(scheme) if not self.found.rotated[layer]]
            if still:
                raise UnsupportedModelError(
                    f"{scheme.name}: {self.name} leaves layer {', '.join(map(str, still))} unrotated in its own code: "
                    f"name layers among {', '.join(str(i) for i, turned in enumerate(self.found.rotated) if turned)}"
                )
        dims = self.rotary_dims
        if dims.head_dim % 2:
            raise ValueError(f"{scheme.name}: heads of size {dims.head_dim} cannot be split into pairs")
        scheme.check(dims)
        scheme = self._with_base(scheme)
        parameters = self.rope_parameters(scheme)
        if parameters is None:
            pairs = len(scheme.build(dims).frequencies(torch.device("cpu")))
            if not 0 < pairs <= dims.head_dim // 2:
                raise ValueError(f"{scheme.name}: {pairs} frequencies do not fit heads of {dims.head_dim}")
        elif not self.is_own(scheme):
            scaled = [each for each in by_layer_type(parameters).values() if each.get("rope_type") != "default"]
            if self.length is None and any(each.get(ORIGINAL_LENGTH) is None for each in scaled):
                raise ValueError(
                    f"{scheme.name}: a scaling starts from the length that the base was made for, which the config of "
                    f"{self.name} does not say: set config.{self.family.length}"
                )
            self.make_rotary(parameters)  # raises if it cannot
        return scheme

    def own_rotation(self) -> dict[str, Any]:
        """Return the base's own `rope_parameters`, as far as transformers reads them."""
        own = own_rotation(self._rotary_config(), self.rotary_dims, self.found.rotary, self.family.slices_rotary)
        own.pop(self.family.coordinates, None)  # no choice of a scheme's
        return own

    def _rotary_config(self) -> Any:
        """Return the config that says how the base rotates, one made for that where its own says it otherwise."""
        if self.family.own_rotation is None:
            return self.config
        config = LlamaConfig(**({} if self.length is None else {"max_position_embeddings": self.length}))
        config.rope_parameters = self.family.own_rotation(self.config)
        return config

    def make_rotary(self, parameters: dict[str, Any]) -> nn.Module:
        """Return a rotary module of transformers with these parameters."""
        config = self._rotary_config()
        rotary = make_rotary(parameters, config, self.rotary_dims, self.found.rotary, self.family.slices_rotary)
        if isinstance(rotary, PartialRotary):
            rotary.takes = rotary.gives = self.family.angles
        return rotary

    def scaling_with(self, layer: int, parameters: dict[str, Any]) -> float:
        """Return the factor of the scores that a layer's attention would have, made with these `rope_parameters`."""
        attention: Any = self.found.attention_of[layer]
        config = copy.deepcopy(self.config)
        config.rope_parameters = parameters
        with torch.device("meta"):
            return float(type(attention)(config, getattr(attention, self.family.layer_index)).scaling)

    def is_own(self, scheme: Any) -> bool:
        """Return whether a fitted scheme is what the base does by itself where it rotates, in every respect."""
        if self.found.rotary is None or (parameters := self.rope_parameters(scheme)) is None:
            return False
        return parameters == self.rope_parameters(self._with_base(Rope()))

    def _with_base(self, scheme: RotaryScheme) -> RotaryScheme:
        return scheme.with_base(self.own_rotation(), self.length, scaling_types(), self.pairs)

    def rope_parameters(self, scheme: RotaryScheme) -> dict[str, Any] | None:
        """Return a fitted scheme's `rope_parameters` as this base writes them: whole heads need no saying.

        Raises:
            ValueError: if they name layer types that the base does not have.
        """
        parameters = scheme.rope_parameters()
        if parameters is None:
            return None
        written = by_layer_type(self.own_rotation())
        given = {kind: dict(each) for kind, each in by_layer_type(parameters).items()}
        if None in given and None not in written:
            given = {kind: dict(given[None]) for kind in written}
        if set(given) != set(written):
            has = ", ".join(str(kind) for kind in written if kind is not None)
            raise ValueError(
                f"{scheme.name}: rope_parameters name the layer types {', '.join(map(str, given))}, this base has "
                f"{has or 'none'}"
            )
        for kind, each in given.items():
            if each.setdefault("partial_rotary_factor", 1.0) == 1.0 and "partial_rotary_factor" not in written[kind]:
                del each["partial_rotary_factor"]
        if (key := self.family.coordinates) is not None and key in self.config.rope_parameters:
            given[None][key] = self.config.rope_parameters[key]
        return given[None] if None in given else given

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window that the base gives a layer, in tokens, or None."""
        if self.family.own_window is not None:
            return self.family.own_window(self.found.attentions[layer])
        types = getattr(self.config, "layer_types", None)
        if types is not None and types[layer] != "sliding_attention":
            return None
        return getattr(self.config, "sliding_window", None)

    def native(self) -> Native:
        """Return what the base uses for positions; the table is detached, without the rows before position 0."""
        table, found = None, self.found
        if isinstance(found.position_table, nn.Embedding):
            table = found.position_table.weight.detach()[self.family.table_offset :]
        rms = 0.0
        if not found.token_embedding.weight.is_meta:
            entering = (
                self._entering_tokens() if found.position_table is None else found.token_embedding(self._sample())
            )
            rms = entering.detach().double().square().mean().sqrt().item()
        return Native(table, rms, self.length)

    def _sample(self) -> torch.Tensor:
        """Return up to 4096 tokens from all over the vocabulary."""
        weight = self.found.token_embedding.weight
        return torch.arange(0, weight.shape[0], max(1, weight.shape[0] // 4096), device=weight.device)

    def _entering_tokens(self) -> torch.Tensor:
        """Return the hidden states that enter the first layer: many families scale their embeddings on the way.

        A forward pass of the decoder stops at the first layer, which stays in its place: transformers may install
        hooks in this pass that record outputs, once and for all, on the layers that it finds. What the caller has
        compiled runs as it was written: torch.compile cannot trace the hook, and would compile for this pass alone.
        """
        decoder: Any = self.found.decoder
        looking = {threading.get_ident()}

        def stop(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() in looking:  # other threads compute on; so does a copy that has this hook
                raise _Entered(args[0] if args else kwargs["hidden_states"])

        hook = self.found.layers[0].register_forward_pre_hook(stop, prepend=True, with_kwargs=True)
        try:
            # Without dropout, which would change their size.
            with evaluation(decoder), torch.no_grad(), _STANCE, torch.compiler.set_stance("force_eager"):
                decoder.forward(input_ids=self._sample()[:, None], use_cache=False)
        except _Entered as entered:
            return entered.hidden_states
        finally:
            hook.remove()
            looking.clear()
        raise UnsupportedModelError(f"{type(decoder).__name__} never calls its first layer")


class _Entered(Exception):  # no error: it stops a forward pass
    """Carries what entered the first layer out of a forward pass."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.hidden_states = hidden_states


@dataclass(frozen=True)
class Plan:
    """What is to be put into a model.

    Attributes:
        base: the model.
        schemes: what goes in, fitted to the base.
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
        kept = [layer for layer in self.kept if self.base.found.rotated[layer]]
        own = [
            layer
            for scheme in self.schemes
            if scheme.acts_on.rotates and self.base.is_own(scheme)
            for layer in self.layers_of(scheme)
        ]
        return tuple(sorted(kept + own))

    @property
    def needs_one_coordinate(self) -> bool:
        """Whether some layer counts positions by one number, in a model whose positions may have several."""
        if self.base.family.coordinates is None:
            return False
        kinds = [each.acts_on for each in self.schemes]
        rotating: list[Any] = [scheme for scheme in self.schemes if scheme.acts_on.rotates]
        angles = [self.base.rope_parameters(scheme) for scheme in rotating]
        named = any(scheme.layers is not None for scheme in self.schemes)
        return named or None in angles or any(kind.attends or kind.adds_vectors for kind in kinds)

    def resolved(self, native: Native) -> Plan:
        """Return the plan with the choices made that depend on the base's weights."""
        return replace(self, schemes=tuple(scheme.resolve(native, self.base.dims) for scheme in self.schemes))

    def limit(self) -> int | None:
        """Return the number of positions that exist, or None if there is no limit."""
        limits = [scheme.limit for scheme in self.schemes if scheme.limit is not None]
        if self.base.keeps_table:
            limits.append(self.base.config.max_position_embeddings)
        return min(limits, default=None)


def _sizes(family: Family, config: Any, attention: Any, num_layers: int) -> Dims:
    """Return the sizes of one attention."""
    heads = config.num_attention_heads if family.heads is None else getattr(attention, family.heads)
    own = None if family.key_value_heads is None else int(getattr(attention, family.key_value_heads))
    size = next(
        getattr(attention, name) for name in ("qk_head_dim", "head_dim", "head_size") if hasattr(attention, name)
    )
    return Dims(
        num_heads=heads,
        num_key_value_heads=own or getattr(config, "num_key_value_heads", None) or heads,
        head_dim=size,
        hidden_size=config.hidden_size,
        num_layers=num_layers,
        value_dim=getattr(attention, "v_head_dim", size),
    )


def needs_own_attention(family: Family, schemes: Sequence[Scheme]) -> bool:
    """Return whether a model has to attend through the attention function of this package.

    Args:
        family: of the model.
        schemes: that it has.
    """
    if family.bypasses_interface or any(scheme.attends for scheme in schemes):
        return True
    # Its mask, which the layers then take their positions from, is the channel only with this attention.
    in_layers = [each.acts_on.rotates or each.acts_on.adds_vectors for each in schemes if not _at_input(family, each)]
    return family.positions_in_mask and any(in_layers)


def _at_input(family: Family, scheme: Scheme) -> bool:
    """Return whether a scheme needs no positions in the layers, having put them into a table at the input."""
    return family.position_table is not None and scheme.acts_on.enters_at_input


def decoder_of(model: nn.Module) -> nn.Module:
    """Return the module that owns the layers of a model of a known family."""
    config: Any = model.config
    return families.base.decoder_of(family_for(base_model_type(config)), model)


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
            scheme, layers=select(scheme.name, scheme.layers, base.dims.num_layers, types), window=_window_of(scheme)
        )
        for scheme in schemes
    ]
    taken: dict[int, Scheme] = {}
    for scheme in chosen:
        for layer in base.layers_of(scheme):
            if layer not in base.sizes and not scheme.acts_on.adds_vectors:
                raise UnsupportedModelError(
                    f"{scheme.name}: layer {layer} of {base.name} has no attention, so nothing there has positions: "
                    f"name layers among {', '.join(map(str, base.sizes))}"
                )
            if (other := taken.setdefault(layer, scheme)) is not scheme:
                raise ValueError(
                    f"{other.name} and {scheme.name} both name layer {layer}: give each of them layers of its own, as "
                    "in [Alibi(layers='0::2'), Nope(layers='1::2')]"
                )
        _check_window(scheme, base)
    if base.family.bypasses_interface and len(taken) < base.dims.num_layers:
        names = " and ".join(scheme.name for scheme in chosen)
        raise UnsupportedModelError(
            f"{names} in some layers: the attention of {base.name} never calls transformers' attention interface, so "
            "that layers which keep what the base has cannot run beside those that are replaced. Give every layer a "
            "scheme"
        )
    check_engine(attention)
    base = replace(base, keeps_table=base.has_table and len(taken) < len(base.found.layers))
    plan = Plan(base, tuple(scheme.acts_on.fit(scheme, base) for scheme in chosen), attention)
    turning = plan.rotated_by_base() or any(scheme.acts_on.rotates for scheme in chosen)
    if base.has_temperature and turning and not all(scheme.acts_on.rotates for scheme in chosen):
        raise UnsupportedModelError(
            f"{base.name} multiplies its queries by a factor that grows with the position, in all layers or in none: "
            "give every layer a scheme of one kind"
        )
    for scheme in chosen:
        if scheme.window is not None and not scheme.acts_on.attends:
            base.require_own_attention(f"{scheme.name} with a window")
        elif not scheme.acts_on.attends and needs_own_attention(base.family, [scheme]):
            base.require_own_attention(scheme.name)
    if attention != "auto" and not plan.attends:
        names = " and ".join(scheme.name for scheme in chosen)
        raise ValueError(
            f"{names} keeps the model's own attention; attention={attention!r} can be chosen for schemes "
            "that change "
            "scores only"
        )
    return plan


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
    names = " and ".join(scheme.name for scheme in plan.schemes)
    turning = [scheme for scheme in plan.schemes if scheme.acts_on.rotates and found.rotary is None]
    turned = {layer for scheme in turning for layer in plan.layers_of(scheme)}  # their attention changes its class
    if plan.base.family.bypasses_interface:
        turned = set(found.attention_of)
    for index, attention in found.attention_of.items():
        if index not in turned and not plan.attends:
            continue
        hooked = has_own_forward(attention)
        if not hooked and index not in turned and "_hf_hook" in attention.__dict__:  # which calls what it replaced
            behind = attention.__dict__.get("_old_forward")
            hooked = getattr(behind, "__func__", None) is type(attention).forward
        if not hooked:
            raise UnsupportedModelError(
                f"the attention of layer {index} has a forward of its own ({attention.__dict__['forward']!r:.80}), "
                f"which {names} would not reach: take it off ({TAKE_OFF}), patch the model, and put it on again"
            )


def check_class_undone(model: nn.Module) -> None:
    """Raise UnsupportedModelError if a forward was put on an attention whose class is to be changed back."""
    for name, module in model.named_modules():
        if isinstance(module, ReplacedAttention) and not has_own_forward(module):
            raise UnsupportedModelError(
                f"{name} was given a forward of its own after the model was patched, which would stay: take "
                f"it off ({TAKE_OFF}), then unpatch the model"
            )
