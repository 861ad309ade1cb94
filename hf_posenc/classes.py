"""Own model types: classes made on demand as `(PosEncMixin, LlamaForCausalLM)`, configs likewise.

A patched model has model type `posenc_<base>`, so that what it saves cannot be loaded as the stock model by mistake.
"""

from __future__ import annotations

import functools
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from . import surgery
from .attention import NAME, revive, stock_class
from .registry import scheme_class, supported_model_types
from .schemes.base import PositionModule, Scheme, ScoreScheme

VERSION = "0.1.0"

TRIPWIRE = "hf_posenc_patched"
"""`attn_implementation` of a saved config. Stock model classes refuse to be built with it, as it is registered nowhere:
not even where hf_posenc was imported, unlike the name of our attention function."""


class PosEncConfigMixin:
    """In front of a stock config class: writes the scheme and the trip-wire."""

    position_encoding: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict, with the trip-wire."""
        stock: dict[str, Any] = super().to_dict()  # type: ignore[misc]  # the stock class is behind us
        return {**stock, "attn_implementation": TRIPWIRE}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        saved = super().to_diff_dict()  # type: ignore[misc]
        return {**saved, "position_encoding": self.position_encoding, "attn_implementation": TRIPWIRE}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the stock class, since this one is made on demand."""
        return revive, (config_class, stock_class(type(self), PosEncConfigMixin)), self.__dict__

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy our source into the next checkpoint."""


class PosEncMixin:
    """In front of a stock model class: builds the scheme on loading, guards the attention implementation."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        """Build the stock model and put in the scheme that the config names.

        Args:
            config: of a class made by `config_class`.
            *args: handed on.
            **kwargs: handed on.
        """
        scheme = scheme_of(config)
        backend = config._attn_implementation_internal
        if backend in (NAME, TRIPWIRE):  # the stock constructor refuses them, as it should
            config._attn_implementation_internal = None
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if lacks_loss_type(self):
            self.loss_type = "ForCausalLM"
        base = self.base_model
        if "_posenc_patch" not in base.__dict__:
            object.__setattr__(base, "_posenc_patch", surgery.Patch(scheme, "auto", None))
            plan = surgery.make_plan(base, scheme, "auto")
            owners = surgery.operate(surgery.Undo(), plan, config)
            if not next(base.parameters()).is_meta:  # from_config; from_pretrained initialises what it does not load
                for owner in owners:
                    owner.reset_parameters()
            for module in base.modules():
                if isinstance(module, PreTrainedModel) and not isinstance(module, PosEncMixin):
                    module.__class__ = model_class(type(module))
        elif isinstance(scheme, ScoreScheme):
            config._attn_implementation_internal = NAME

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PositionModule):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, allow_all_kernels: bool = False
    ) -> str:
        """Refuse what would drop the scheme; called by the stock constructor and by `set_attn_implementation`."""
        scheme = scheme_of(self.config)
        if isinstance(scheme, ScoreScheme) and not is_init_check and attn_implementation != NAME:
            raise ValueError(
                f"attn_implementation={attn_implementation!r} would drop {scheme.name}, which changes attention "
                "scores: keep "
                f"{NAME!r} (engines are chosen with patch_model(..., attention=...)), or unpatch the model first"
            )
        if attn_implementation == NAME:
            return NAME
        return super()._check_and_adjust_attn_implementation(  # type: ignore[misc]
            attn_implementation, is_init_check=is_init_check, allow_all_kernels=allow_all_kernels
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the stock class, since this one is made on demand."""
        return revive, (model_class, stock_class(type(self), PosEncMixin)), self.__dict__

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would copy our source into the next checkpoint."""


def lacks_loss_type(model: Any) -> bool:
    """Return whether transformers cannot tell a causal language model's loss from its class name.

    It then takes the right one and warns, which breaks `torch.compile(fullgraph=True)`: GPT2LMHeadModel.
    """
    return model.loss_type is None and model.can_generate()


def scheme_of(config: PreTrainedConfig) -> Scheme:
    """Return the scheme that a config of ours names.

    Raises:
        ValueError: if it names none, or an unknown one (UnknownSchemeError).
    """
    entry = dict(getattr(config, "position_encoding", None) or {})
    if "scheme" not in entry:
        raise ValueError(f"config.json of model type {config.model_type!r} has no position_encoding.scheme")
    entry.pop("hf_posenc_version", None)
    return scheme_class(entry.pop("scheme")).parse(entry)


def entry_of(scheme: Scheme) -> dict[str, Any]:
    """Return a config's `position_encoding` for a resolved scheme."""
    return {"scheme": scheme.name, **scheme.hyperparameters(), "hf_posenc_version": VERSION}


@functools.cache
def config_class(stock: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """Return our config class in front of a stock one, model type `posenc_<base>`, known to AutoConfig."""
    members = {
        "model_type": f"posenc_{stock.model_type}",
        "__module__": __name__,
        "__annotations__": {"position_encoding": "dict | None"},
        "position_encoding": None,
    }
    cls = type("PosEnc" + stock.__name__, (PosEncConfigMixin, stock), members)
    AutoConfig.register(cls.model_type, cls, exist_ok=True)
    return cls


@functools.cache
def model_class(stock: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """Return our model class in front of a stock one."""
    from transformers.utils import output_capturing

    config = config_class(stock.config_class)
    cls = type("PosEnc" + stock.__name__, (PosEncMixin, stock), {"__module__": __name__, "config_class": config})
    # Which outputs a model can record is looked up by its class; without this, output_attentions gives None.
    dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(cls), cls._can_record_outputs)
    return cls


def register_auto() -> None:
    """Let AutoConfig, AutoModel and AutoModelForCausalLM find our class of every family that can be patched."""
    for model_type in supported_model_types():
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
        model = getattr(transformers, name)
        if model.config_class.model_type != model_type:  # served by the text model's type, see its adapter
            continue
        base = getattr(transformers, MODEL_MAPPING_NAMES[model_type])
        config = config_class(model.config_class)
        AutoModel.register(config, model_class(base), exist_ok=True)
        AutoModelForCausalLM.register(config, model_class(model), exist_ok=True)
