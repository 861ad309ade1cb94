"""Classes of patched models and their configs, made on demand: `(PosEncMixin, LlamaForCausalLM)`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, SupportsIndex, cast

import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from ..core.errors import CheckpointError
from ..core.layer_state import MARKER
from ..core.modules import PositionModule
from ..core.registry import family_for
from ..families.base import family_of, language_config
from ..model.obstacles import gathered
from ..model.patch_record import PATCH, OfPatched, patch_of, patched_part
from ..model.undo import Change, SetAttribute, SetClass, Undo
from ..patching.changes import place
from ..patching.plan import keeps_kernel, make_plan, needs_our_attention
from ..schemes.base import Scheme
from ..transformers_glue import NAME
from ..transformers_glue.derived_classes import revive, stock_class
from ..transformers_glue.flash import is_plain
from ..transformers_glue.positions_in_mask import carrying_forward
from .auto_classes import CLASSES
from .class_names import Kind, architecture, heads_of, name_of, stock_classes, transformers_class
from .config import UNREGISTERED, ConfigMixin, NotCustom, stock_config, stock_inside
from .files import JsonObject
from .lora import AdapterMixin
from .saving import CheckpointMixin
from .scheme_entry import ENTRY, SCHEMES, check_version, make_entry, schemes_of_config


class PosEncConfigMixin(ConfigMixin):
    """Mixin in front of a stock config class."""

    def __post_init__(self, *args: object, **kwargs: object) -> None:
        """Initialize the stock config, and register its models with the Auto classes.

        Args:
            *args: passed to the stock class.
            **kwargs: passed to the stock class.
        """
        super().__post_init__(*args, **kwargs)
        register_models(stock_class(type(self), PosEncConfigMixin))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle and copy by naming the stock class, because this class is made on demand."""
        return revive, (config_class, stock_class(type(self), PosEncConfigMixin)), self.__dict__


class MultimodalMixin(PosEncConfigMixin):
    """Mixin in front of the stock config class of a multimodal model. Its text config holds the schemes."""

    text_config: Any

    def __post_init__(self, *args: object, **kwargs: object) -> None:
        """Make the text config with our class, before the stock class makes a stock one.

        Args:
            *args: passed to the stock class.
            **kwargs: passed to the stock class.
        """
        if isinstance(text := self.text_config, dict) and str(text.get("model_type")).startswith("posenc_"):
            self.text_config = CONFIG_MAPPING[text["model_type"]](**text)
        with stock_inside(self):
            super().__post_init__(*args, **kwargs)

    @property
    def position_encoding(self) -> JsonObject | None:
        """The entry of the text config."""
        return getattr(self.text_config, ENTRY, None)

    @position_encoding.setter
    def position_encoding(self, entry: JsonObject | None) -> None:
        setattr(self.text_config, ENTRY, entry)

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict, with the entry outside the text config."""
        whole = super().to_dict()
        return {**whole, ENTRY: whole["text_config"].pop(ENTRY, None)}


class PosEncMixin(NotCustom, CheckpointMixin, AdapterMixin, OfPatched):
    """Mixin in front of a stock model class.

    It puts the config's schemes into a new model, and refuses attention implementations that would drop them.
    """

    def __init__(self, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:
        """Build the stock model and the schemes that the config names.

        Args:
            config: a config of a class made by `config_class`.
            *args: passed to the stock class.
            **kwargs: passed to the stock class.
        """
        schemes = schemes_of_config(config)  # first, because a malformed entry may have no version to check
        check_version(config)
        needs_attention = self.attends_by_ours(config)
        language = language_config(config)
        backend = language._attn_implementation_internal
        # Whether another kernel fits schemes that keep one, `make_plan` sees. It may not be loaded yet.
        takes_plain = needs_attention and not keeps_kernel(family_of(config), schemes)
        if takes_plain and backend not in (NAME, UNREGISTERED) and not is_plain(backend):
            raise ValueError(_reason_to_refuse(schemes, backend))
        for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
            # Stock constructors refuse these names.
            if getattr(each, "_attn_implementation_internal", None) in (NAME, UNREGISTERED):
                cast(PreTrainedConfig, each)._attn_implementation_internal = None
        with stock_inside(config):
            super().__init__(config, *args, **kwargs)
        if _lacks_loss_type(self):
            self.loss_type = "ForCausalLM"
        # Some stock constructors (of sequence classification) make the decoder with AutoModel, and so with our class.
        # It has then patched itself.
        if patch_of(self) is None:
            self._build_schemes(schemes)
        elif needs_attention:
            language._attn_implementation_internal = NAME

    def _build_schemes(self, schemes: Sequence[Scheme]) -> None:
        """Patch the stock model without recording the inverse steps."""
        base, config = patched_part(self), self.config
        plan = make_plan(base, schemes, "auto", resolve=False)
        config.position_encoding = {**config.position_encoding, SCHEMES: make_entry(plan.schemes)[SCHEMES]}
        changes = place(plan)
        Undo().apply(SetAttribute(base, PATCH, plan.record(None)), *changes.pending)
        if not next(base.parameters()).is_meta:  # on the meta device, from_pretrained initialises what it does not load
            for module in changes.position_modules():
                with gathered(module):
                    module.reset_parameters()
        for part in _parts(self, base.config):
            if not isinstance(part, PosEncMixin):
                part.__class__ = model_class(type(part), stock_config(part.config))

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Return the stock class's answer.

        transformers reads the file that defines a class, and ours is another file.
        """
        stock: Any = stock_class(cls, PosEncMixin)
        return bool(stock._can_set_experts_implementation())

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PositionModule):
            # Whoever resets a slice of a parameter would overwrite what was loaded: slices do not have this mark.
            if not all(getattr(each, "_is_hf_initialized", False) for each in module.parameters()):
                module.reset_parameters()
        else:
            super()._init_weights(module)
        for name, buffer in module._buffers.items():
            if name.startswith(MARKER) and buffer is not None:
                init.zeros_(buffer)

    @staticmethod
    def attends_by_ours(config: PreTrainedConfig) -> bool:
        """Return whether a config's model needs the attention function of this package."""
        return needs_our_attention(family_of(config), schemes_of_config(config))

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, allow_all_kernels: bool = False
    ) -> str:
        """Refuse an implementation that would drop the schemes.

        The stock constructor and `set_attn_implementation` call this method.
        """
        if self.attends_by_ours(self.config) and not is_init_check and attn_implementation != NAME:
            raise ValueError(_reason_to_refuse(schemes_of_config(self.config), attn_implementation))
        if attn_implementation == NAME:
            return NAME
        adjusted: str = super()._check_and_adjust_attn_implementation(
            attn_implementation, is_init_check=is_init_check, allow_all_kernels=allow_all_kernels
        )
        return adjusted

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle and copy by naming the stock class, because this class is made on demand."""
        return revive, (model_class, stock_class(type(self), PosEncMixin), stock_config(self.config)), self.__dict__


def _reason_to_refuse(schemes: Sequence[Scheme], attn_implementation: str | None) -> str:
    """Return why schemes that need our attention function refuse another attention implementation."""
    dropped = [scheme.dropped_by_stock_attention() or f"the positions of {scheme.name}" for scheme in schemes]
    return (
        f"attn_implementation={attn_implementation!r} would drop {' and '.join(dropped)}: keep {NAME!r} (engines are "
        "chosen with patch_model(..., attention=...)), or unpatch the model first"
    )


def _parts(model: PreTrainedModel, language: PreTrainedConfig) -> list[PreTrainedModel]:
    """Return a model and the models of transformers inside it, without encoders of images or sound.

    Args:
        model: the whole model.
        language: config of its language model.
    """
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return [part for part in parts if part.config is model.config or part.config is language]


def _lacks_loss_type(model: PreTrainedModel) -> bool:
    """Return whether transformers cannot infer a model's loss from its class name. It cannot for GPT2LMHeadModel.

    transformers then takes the right loss and warns. The warning breaks `torch.compile(fullgraph=True)`.
    """
    return model.loss_type is None and model.can_generate()


def cached(function: Kind) -> Kind:
    """Cache the values of a function as `functools.cache` does, and keep its signature for type checkers."""
    return cast(Any, functools.cache(cast(Any, function)))


@cached
def config_class(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return our config class, with model type `posenc_<base>`, that derives from a stock one."""
    members: dict[str, object] = {"model_type": f"posenc_{stock.model_type}", "__module__": __name__}
    mixin = MultimodalMixin if "text_config" in stock.sub_configs else PosEncConfigMixin
    if mixin is PosEncConfigMixin:
        members |= {"__annotations__": {ENTRY: "dict | None"}, ENTRY: None}
    cls = type("PosEnc" + stock.__name__, (mixin, stock), members)
    cls.__module__ = CLASSES  # set afterwards, because dataclasses look into the module, which may not be imported yet
    return cls


@cached
def register_models(stock: type[PreTrainedConfig]) -> None:
    """Register our model classes of a family with the Auto classes, and LoRA's default target modules with PEFT.

    This runs when the first config of a class is made, which is before anybody looks for its model. Registering all
    families when the package is imported would import the code of all families.

    Args:
        stock: stock config class of the family.
    """
    import peft.utils.constants

    config = config_class(stock)
    for auto, name in heads_of(stock).items():
        model = transformers_class(name, PreTrainedModel)
        # Not the text model of a multimodal type.
        if model is not None and model.config_class not in stock.sub_configs.values():
            getattr(transformers, auto).register(config, model_class(model, stock), exist_ok=True)
    for name, table in vars(peft.utils.constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO") and isinstance(table, dict) and stock.model_type in table:
            table.setdefault(f"posenc_{stock.model_type}", table[stock.model_type])


@cached
def model_class(stock: type[PreTrainedModel], config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    """Return our model class that derives from a stock one.

    Args:
        stock: stock model class.
        config: stock config class of the model.
    """
    if config is not stock.config_class and config.model_type == stock.config_class.model_type:
        return model_class(stock, stock.config_class)
    from transformers.utils import output_capturing

    name, members = name_of(stock, config), {"__module__": CLASSES, "config_class": config_class(config)}
    if (forward := carrying_forward(stock, str(config.model_type))) is not None:
        members["forward"] = forward
    cls: type[PreTrainedModel] = type(name, (PosEncMixin, stock), members)
    # transformers looks up by class which outputs a model can record. Without this, output_attentions gives None.
    dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(cls), cls._can_record_outputs)
    return cls


def saved_class(raw: JsonObject) -> type[PreTrainedModel]:
    """Return our model class that a patched checkpoint names. No code of the checkpoint runs.

    Args:
        raw: contents of the checkpoint's config.json.

    Raises:
        UnsupportedModelError: if no family serves the base.
        CheckpointError: if config.json names no class of ours for that base.
    """
    base = str(raw["model_type"]).removeprefix("posenc_")
    language = text if isinstance(text := raw.get("text_config"), dict) else raw
    family_for(str(language.get("model_type")).removeprefix("posenc_"))
    config, model = stock_classes(architecture(raw))
    if config is None or model is None or config.model_type != base:
        raise CheckpointError(
            f"hf_posenc: architectures is {raw.get('architectures')!r}, which names no hf_posenc class for {base}"
        )
    return model_class(model, config)


def classes_of_ours(model: PreTrainedModel, language: PreTrainedConfig, entry: JsonObject) -> list[Change]:
    """Return the changes that give a model and its configs our classes, so that no stock class loads its checkpoints.

    Args:
        model: a model with stock classes.
        language: config of its language model. Unless the model is multimodal, this is the model's config.
        entry: the entry `position_encoding` of that config, with resolved schemes.
    """
    # PEFT writes this name into adapters as their base. The stock checkpoint would be the wrong base.
    changes: list[Change] = [SetAttribute(model, "name_or_path", "")]
    if _lacks_loss_type(model):
        changes.append(SetAttribute(model, "loss_type", "ForCausalLM"))
    config, parts = model.config, _parts(model, language)
    part_classes = [model_class(type(part), stock_config(part.config)) for part in parts]
    for changed in [language] if language is config else [language, config]:
        our_config = config_class(type(changed))
        register_models(type(changed))
        changes += [
            SetClass(changed, our_config),
            SetAttribute(changed, "model_type", our_config.model_type),  # a config read from a file has the attribute
            SetAttribute(changed, "_name_or_path", ""),
        ]
    return [
        *changes,
        *(SetClass(part, part_class) for part, part_class in zip(parts, part_classes, strict=True)),
        SetAttribute(language, ENTRY, entry),
        SetAttribute(config, "architectures", [part_classes[0].__name__]),
    ]
