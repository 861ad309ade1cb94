"""Own model types: classes made on demand as `(PosEncMixin, LlamaForCausalLM)`, configs likewise.

A patched model has model type `posenc_<base>`, and what it saves cannot be loaded as the stock model by mistake. Four
wires see to that, each for who gets past the ones before it: the model type (Auto classes), an attention implementation
that is registered nowhere (stock classes), an activation that no stock class knows (stock classes that are given an
attention implementation), and a tensor named after the scheme (state dicts loaded by hand).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import peft.utils.constants
import transformers
from packaging.version import InvalidVersion, Version
from safetensors import SafetensorError
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto import modeling_auto

from . import files, hub, surgery
from .attention import NAME, SPLIT_HEADS, revive, stock_class
from .errors import CheckpointError, HfPosencError, UnknownSchemeError, UnsupportedModelError, WeightShapeError
from .registry import adapter_for, scheme_class, supported_model_types
from .schemes.base import PositionModule, Scheme, ScoreScheme

VERSION = "0.2.0.dev0"

TRIPWIRE = "hf_posenc_patched"
"""`attn_implementation` of a saved config. Stock model classes refuse to be built with it, as it is registered nowhere:
not even where hf_posenc was imported, unlike the name of our attention function."""

ACTIVATION = "hf_posenc:"
"""Put in front of a saved config's activation. Every stock model looks it up when it is built, and finds nothing."""

_READ = "_posenc_read"
"""Attribute of a config between its reading and the building of the model: the digest of what was read, the options
that it was read with, and what it was then as a dict."""

_ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")

DIGESTS = "hf_posenc_digests"
"""Key of a saved config: SHA-256 by file name, of the config itself and of the headers and index of its weights.

What was changed by accident would otherwise load as another model. They stop nobody who changes them too."""

ADAPTER_ENTRY = "position_encoding"
"""Key of `auto_mapping` in adapter_config.json that holds the patched base's entry. PEFT keeps the dict as it is."""

STUB = "modeling_hf_posenc"
"""The file beside a checkpoint that `trust_remote_code=True` runs: it imports our classes, and nothing else."""

_HEADS = {
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}
"""Auto classes that know our models, and transformers' own table of each: model type -> class name."""


class PosEncConfigMixin:
    """In front of a stock config class: writes the scheme and the wires."""

    position_encoding: dict[str, Any] | None = None

    def __post_init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the wire off the activation, then start as the stock config.

        Args:
            *args: handed on.
            **kwargs: handed on.
        """
        for key in _ACTIVATIONS:
            value = getattr(self, key, None)
            if isinstance(value, str):
                setattr(self, key, value.removeprefix(ACTIVATION))
        super().__post_init__(*args, **kwargs)  # type: ignore[misc]  # the stock class is behind us

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Make a config from what was saved, once that is what was saved.

        Args:
            config_dict: of config.json.
            **kwargs: handed on.

        Returns:
            The config; with `return_unused_kwargs` a pair.

        Raises:
            CheckpointError: if the dict was changed after it was saved, or cannot be a config of this class.
        """
        if not isinstance(config_dict, dict):
            raise CheckpointError(f"hf_posenc: a config is a JSON object, not {config_dict!r}")
        saved = {key: value for key, value in config_dict.items() if key != DIGESTS}
        _check_saved_config(config_dict)
        options = copy.copy(kwargs)
        try:
            made = super().from_dict(saved, **kwargs)  # type: ignore[misc]
        except (HfPosencError, OSError):
            raise
        except Exception as error:  # whatever a stock class finds wrong, of any type
            raise CheckpointError(
                f"hf_posenc: config.json makes no {cls.__name__}: {type(error).__name__}: {error}"
            ) from error
        config = made[0] if isinstance(made, tuple) else made
        object.__setattr__(config, _READ, (config_digest(config_dict), options, config.to_dict()))
        return made

    @property
    def output_attentions(self) -> bool | None:
        """Whether the model returns its attention weights. Our attention has them, so none other needs to be set."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool | None) -> None:
        if self._attn_implementation == NAME:
            self._output_attentions = value
        else:
            PreTrainedConfig.output_attentions.fset(self, value)

    def validate(self) -> None:
        """Check the config as transformers does, which believes that its own eager attention alone has weights."""
        wanted = self._output_attentions
        if self._attn_implementation == NAME:
            self._output_attentions = False
        try:
            super().validate()  # type: ignore[misc]
        finally:
            self._output_attentions = wanted

    def _wires(self) -> dict[str, Any]:
        own = {key: getattr(self, key, None) for key in _ACTIVATIONS}
        activations = {key: ACTIVATION + value for key, value in own.items() if isinstance(value, str)}
        return {**activations, "attn_implementation": TRIPWIRE}

    def to_dict(self) -> dict[str, Any]:
        """Return the config as a dict, with the wires."""
        stock: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        stock.pop(_READ, None)
        return {**stock, **self._wires()}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what is saved."""
        saved = super().to_diff_dict()  # type: ignore[misc]
        saved.pop(_READ, None)
        auto_map = {"AutoConfig": f"{STUB}.{type(self).__name__}"}
        auto_map |= {auto: f"{STUB}.PosEnc{name}" for auto, name in heads_of(self).items()}
        entry = self.position_encoding
        if isinstance(entry, dict):  # what an older version wrote is written anew in the form of this one
            entry = {**entry, "hf_posenc_version": VERSION}
        return {**saved, "position_encoding": entry, "auto_map": auto_map, **self._wires()}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the stock class, since this one is made on demand."""
        return revive, (config_class, stock_class(type(self), PosEncConfigMixin)), self.__dict__

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: transformers would copy our source into the next checkpoint."""


_PUSH_OPTIONS = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


class PosEncMixin:
    """In front of a stock model class: builds the scheme on loading, guards the attention implementation."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        """Build the stock model and put in the scheme that the config names.

        Args:
            config: of a class made by `config_class`.
            *args: handed on.
            **kwargs: handed on.
        """
        config.__dict__.pop(_READ, None)
        scheme_of(config)
        check_version(config)
        write_out(config)
        scheme = scheme_of(config)
        backend = config._attn_implementation_internal
        if isinstance(scheme, ScoreScheme) and any(kind in str(backend) for kind in ("flash", "paged")):
            raise ValueError(would_drop(scheme, backend))
        if backend in (NAME, TRIPWIRE):  # the stock constructor refuses them, as it should
            config._attn_implementation_internal = None
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        if lacks_loss_type(self):
            self.loss_type = "ForCausalLM"
        base = self.base_model
        if "_posenc_patch" not in base.__dict__:
            object.__setattr__(base, "_posenc_patch", surgery.Patch(scheme, "auto", None))
            try:
                plan = surgery.make_plan(base, scheme, "auto")
            except HfPosencError:
                raise
            except (TypeError, ValueError) as error:
                raise CheckpointError(f"hf_posenc: config.json of {config.model_type!r}: {error}") from error
            base._posenc_patch.layers = plan.found.layers
            base._posenc_patch.scheme = plan.scheme
            config.position_encoding = {**config.position_encoding, **plan.scheme.hyperparameters()}
            owners = surgery.operate(surgery.Undo(), plan, config)
            if not next(base.parameters()).is_meta:  # from_config; from_pretrained initialises what it does not load
                for owner in owners:
                    with surgery.gathered(owner):
                        owner.reset_parameters()
            for module in base.modules():
                if isinstance(module, PreTrainedModel) and not isinstance(module, PosEncMixin):
                    module.__class__ = model_class(type(module))
        elif isinstance(scheme, ScoreScheme):
            config._attn_implementation_internal = NAME

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load as transformers does, and make sure that every position parameter was there.

        Args:
            pretrained_model_name_or_path: a directory or a Hub id.
            *args: handed on.
            output_loading_info: also return transformers' account of missing, unexpected and mismatched keys.
            **kwargs: handed on.

        Returns:
            The model, in eval mode; with `output_loading_info` a pair.

        Raises:
            CheckpointError: if the config's entry or a weight is missing, a position parameter is unexpected, or files
                are not those that were saved together.
            WeightShapeError: if a weight has another shape than the config asks for.
            UnsupportedModelError: for tensor parallelism, if the scheme changes attention scores.
        """
        path = pretrained_model_name_or_path
        directory = None if path is None else Path(path) / (kwargs.get("subfolder") or "")
        if directory is None or not directory.is_dir():
            model, info = cls._from_pretrained(path, path, *args, **kwargs)
        else:
            kwargs.pop("subfolder", None)
            model, info = files.read(directory, lambda folder: cls._from_folder(folder, directory, *args, **kwargs))
            model.config.name_or_path = model.name_or_path = str(path)
        return (model, info) if output_loading_info else model

    @classmethod
    def _from_folder(cls, folder: Path, directory: Path, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Load from a folder that nobody changes meanwhile.

        Args:
            folder: what to read.
            directory: how to call it in messages.
            *args: as for `from_pretrained`.
            **kwargs: as for `from_pretrained`.
        """
        raw = files.json_object(folder / "config.json") if (folder / "config.json").exists() else {}
        if (folder / "adapter_config.json").exists() and raw:
            raise CheckpointError(
                f"hf_posenc: {directory} holds a whole model and an adapter, which may name another base: load the "
                "model from a folder of its own, then the adapter with hf_posenc.load_adapter"
            )
        if kwargs.get("state_dict") is None and kwargs.get("gguf_file") is None:
            _check_saved_weights(raw, folder, directory)
        if isinstance(config := kwargs.get("config"), PosEncConfigMixin):
            read = config.__dict__.get(_READ)
            if read is not None and read[0] != config_digest(raw):  # saved anew since an Auto class read the config
                if config.to_dict() != read[2]:
                    raise CheckpointError(
                        f"hf_posenc: {directory} was saved anew after the given config had been read from it and "
                        "changed: read the config again, or pass the changes to from_pretrained"
                    )
                kwargs["config"] = cls.config_class.from_pretrained(folder, **_overrides(read[1]))
        model, info = cls._from_pretrained(folder, directory, *args, **kwargs)
        if folder != directory and "disk" in (getattr(model, "hf_device_map", None) or {}).values():
            raise CheckpointError(
                f"hf_posenc: a save into {directory} was interrupted before its files were moved into place, and "
                "weights that stay on disk would be looked for where they lie now: call hf_posenc.files.complete on "
                "the folder first"
            )
        return model, info

    @classmethod
    def _from_pretrained(cls, path: Any, source: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Load as transformers does, and check what it says of the weights.

        Args:
            path: what to read: a folder, a Hub id, or None.
            source: how to call it in messages.
            *args: as for `from_pretrained`.
            **kwargs: as for `from_pretrained`.
        """
        accept = kwargs.pop("ignore_mismatched_sizes", False)
        kwargs.setdefault("use_safetensors", True)  # what we save; other formats are read by unpickling
        try:
            # Ignored here and checked below, where they are named; transformers would only log their names.
            model, info = super().from_pretrained(  # type: ignore[misc]
                path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except SafetensorError as error:
            raise CheckpointError(f"hf_posenc: the weights of {source} cannot be read: {error}") from error
        if info["mismatched_keys"] and not accept:
            said = ", ".join(str(each) for each in sorted(info["mismatched_keys"], key=str))
            raise WeightShapeError(
                f"hf_posenc: weights of {source} have another shape than {model.config.position_encoding} and the rest "
                f"of its config ask for (key, found, wanted): {said}"
            )
        check_loaded(model, info, source)
        if isinstance(scheme_of(model.config), ScoreScheme) and (model.tp_size or 1) > 1:
            raise UnsupportedModelError(f"{scheme_of(model.config).name}: {SPLIT_HEADS}")
        return model, info

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        tokenizer: Any = None,
        push_to_hub: bool = False,
        **kw: Any,
    ) -> None:
        """Save as transformers does, with the wires, the stub and a model card, all or nothing.

        A kill at any moment leaves the old checkpoint or the new one. Other files of the directory stay; a README.md
        that is there is kept.

        Args:
            save_directory: where to.
            *args: handed on.
            tokenizer: saved with the model, its `model_max_length` set to what the scheme allows.
            push_to_hub: upload what was saved, as `push_to_hub` does.
            **kw: of `save_pretrained` in transformers, and of `push_to_hub`.

        Raises:
            UnsupportedModelError: if FSDP or ZeRO-3 has spread the parameters and no `state_dict` is given, or if
                layers were added, changed or removed since the model was patched, so that it could not be loaded again.
        """
        self._check_layers()
        directory = Path(save_directory)
        options = {key: kw.pop(key) for key in _PUSH_OPTIONS if key in kw}
        repo_id = kw.pop("repo_id", None) or directory.name
        if kw.get("distributed_checkpoint"):  # every process writes shards of its own, for resuming only
            super().save_pretrained(save_directory, *args, **kw)  # type: ignore[misc]
            return
        is_main_process = args[0] if args else kw.get("is_main_process", True)
        if not is_main_process:
            super().save_pretrained(save_directory, *args, **kw)  # type: ignore[misc]
            return
        state = args[1] if len(args) > 1 else kw.get("state_dict")
        if state is None and surgery.is_spread(self):
            raise UnsupportedModelError(
                "the parameters of this model are spread over processes: on every process call state = "
                "accelerator.get_state_dict(model), then on the main process accelerator.unwrap_model(model)"
                ".save_pretrained(directory, state_dict=state)"
            )
        if any("_orig_mod" in name for name in (dict(self.named_modules()) if state is None else state)):
            raise UnsupportedModelError(
                "torch.compile(module) has put a wrapper around a part of this model and renamed its weights, which no "
                "model would find when loading: compile in place (module.compile()), or save accelerate's "
                "unwrap_model(model, keep_torch_compile=False)"
            )
        with files.staged(directory) as folder:
            super().save_pretrained(folder, *args, **kw)  # type: ignore[misc]
            if (folder / "config.json").is_file():  # not where only an adapter is saved, or another process writes
                (folder / f"{STUB}.py").write_text(stub_text(self.config), encoding="utf-8")
                if not (directory / "README.md").exists():
                    text = hub.card(self.config.to_diff_dict())
                    (folder / "README.md").write_text(text, encoding="utf-8")
            if tokenizer is not None:
                tokenizer = copy.deepcopy(tokenizer)
                tokenizer.model_max_length = self.config.max_position_embeddings
                tokenizer.save_pretrained(folder)
            if (folder / "config.json").is_file():
                _write_digests(folder)
        if push_to_hub:
            hub.push(directory, repo_id, **options)

    def _check_layers(self) -> None:
        """Raise UnsupportedModelError unless the layers are patched, and as many as the config says."""
        decoder = surgery.decoder_of(self)
        if (problem := decoder.posenc_layers.problem(decoder)) is not None:
            raise UnsupportedModelError(problem)
        count = len(decoder.get_submodule(decoder.posenc_layers.layers))
        if count != self.config.num_hidden_layers:
            raise UnsupportedModelError(
                f"the model has {count} layers, its config says {self.config.num_hidden_layers}: set "
                f"config.num_hidden_layers = {count} and what else the config lists by layer (layer_types, ...)"
            )

    def push_to_hub(
        self, repo_id: str, *, tokenizer: Any = None, max_shard_size: int | str = "50GB", **options: Any
    ) -> Any:
        """Upload the model in one commit, with the wires, the stub and a card that says how to load it.

        Args:
            repo_id: `name` or `organization/name`; made if it does not exist.
            tokenizer: uploaded with the model.
            max_shard_size: size of a weight file, e.g. `"5GB"`.
            **options: `commit_message`, `commit_description`, `private`, `token`, `revision`, `create_pr`, `tags`, as
                transformers has them.

        Returns:
            huggingface_hub's CommitInfo.

        Raises:
            TypeError: for an option that is none of these.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, tokenizer=tokenizer, max_shard_size=max_shard_size)
            return hub.push(Path(folder), repo_id, **options)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False: transformers would leave modules without parameters of their own out of initialisation."""
        return False

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; where PEFT leaves the configs of its adapters, have each name the base, to be saved."""
        if name == "peft_config" and isinstance(value, dict):
            for adapter, config in value.items():
                value[adapter] = name_base(self, config)
        super().__setattr__(name, value)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PositionModule):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]
        for name, buffer in module._buffers.items():
            if name.startswith(surgery.MARKER) and buffer is not None:
                init.zeros_(buffer)

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, allow_all_kernels: bool = False
    ) -> str:
        """Refuse what would drop the scheme; called by the stock constructor and by `set_attn_implementation`."""
        scheme = scheme_of(self.config)
        if isinstance(scheme, ScoreScheme) and not is_init_check and attn_implementation != NAME:
            raise ValueError(would_drop(scheme, attn_implementation))
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


def name_base(model: PreTrainedModel, config: Any) -> Any:
    """Return a PEFT config that says which patched base its adapter is trained on; `load_adapter` compares it.

    PEFT keeps what it says for configs with a `task_type`, and drops it for others. Configs of adapters that sit inside
    the model get it by themselves; those of prompts and prefixes are given to this function before `get_peft_model`.

    Args:
        model: patched.
        config: of any class of PEFT; it stays as it is. One that names a base already keeps it.

    Returns:
        A copy of the config.
    """
    said = config.auto_mapping or {}
    config = copy.copy(config)
    config.auto_mapping = {
        "base_model_class": type(model).__name__,
        "parent_library": type(model).__module__,
        ADAPTER_ENTRY: dict(model.config.position_encoding),
        **said,
    }
    return config


def would_drop(scheme: Scheme, attn_implementation: str | None) -> str:
    """Return why a scheme on attention scores refuses an attention implementation."""
    return (
        f"attn_implementation={attn_implementation!r} would drop {scheme.name}, which changes attention scores: keep "
        f"{NAME!r} (engines are chosen with patch_model(..., attention=...)), or unpatch the model first"
    )


def lacks_loss_type(model: Any) -> bool:
    """Return whether transformers cannot tell a causal language model's loss from its class name.

    It then takes the right one and warns, which breaks `torch.compile(fullgraph=True)`: GPT2LMHeadModel.
    """
    return model.loss_type is None and model.can_generate()


def scheme_of(config: PreTrainedConfig) -> Scheme:
    """Return the scheme that a config of ours names.

    Raises:
        CheckpointError: if it names none, or its hyper-parameters are not exactly those of the scheme.
        UnknownSchemeError: if the scheme is not registered; the message lists those that are.
    """
    entry = getattr(config, "position_encoding", None)
    where = f"config.json of model type {config.model_type!r}"
    if not isinstance(entry, dict) or not isinstance(entry.get("scheme"), str):
        raise CheckpointError(f"hf_posenc: {where} has no position_encoding.scheme")
    values = {key: value for key, value in entry.items() if key not in ("scheme", "hf_posenc_version")}
    try:
        cls = scheme_class(entry["scheme"])
    except UnknownSchemeError as error:
        raise UnknownSchemeError(f"hf_posenc: {where}: {error}") from None
    if missing := sorted({field.name for field in dataclasses.fields(cls)} - set(values)):
        raise CheckpointError(
            f"hf_posenc: {where} lacks {', '.join(missing)} of {entry['scheme']}: without it the model would not be "
            "the one that was saved"
        )
    try:
        return cls.parse(values)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"hf_posenc: {where}: {error}") from error


def check_version(config: PreTrainedConfig) -> None:
    """Compare the version that saved a config with this one: warn where that is newer, refuse a newer major version.

    Raises:
        CheckpointError: if there is no version, or a newer major one.
    """
    saved, own = _version_of(config), Version(VERSION)
    if saved.major > own.major:
        raise CheckpointError(
            f"this checkpoint was saved by hf_posenc {saved}, which {VERSION} cannot know: pip install -U hf_posenc"
        )
    if saved.release[:2] > own.release[:2]:
        warnings.warn(f"this checkpoint was saved by hf_posenc {saved}, newer than this one ({VERSION})", stacklevel=3)


def _version_of(config: PreTrainedConfig) -> Version:
    """Return the version that saved a config of ours; CheckpointError if it names none."""
    stamp = (getattr(config, "position_encoding", None) or {}).get("hf_posenc_version")
    try:
        return Version(str(stamp))
    except InvalidVersion:
        raise CheckpointError(
            f"hf_posenc: position_encoding.hf_posenc_version is {stamp!r}, which is no version"
        ) from None


def write_out(config: PreTrainedConfig) -> None:
    """Say in a config what version 0.1 left unsaid: its `rope` had no scaling unless given, and turned every layer."""
    entry = config.position_encoding
    if entry["scheme"] != "rope" or Version(str(entry["hf_posenc_version"])).release[:2] >= (0, 2):
        return
    config.position_encoding = {**entry, "scaling": entry["scaling"] or "none"}
    if (name := adapter_for(surgery.base_model_type(config)).rotated_layers) is not None:
        setattr(config, name, [1] * config.num_hidden_layers)


def position_keys(model: nn.Module) -> set[str]:
    """Return the state-dict keys that belong to a patched model's scheme: its parameters and its marker."""
    return {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in {**module._parameters, **module._buffers}
        if isinstance(module, PositionModule) or key.startswith(surgery.MARKER)
    }


def check_loaded(model: PreTrainedModel, info: dict[str, Any], source: Any) -> None:
    """Check transformers' account of what was loaded.

    A head that another architecture does not have starts at random, as in transformers; nothing else may.

    Raises:
        CheckpointError: if a weight was missing, or a position parameter left over or of another shape.
    """
    own = position_keys(model)
    missing = set(info["missing_keys"])
    if _version_of(model.config).release[:2] < (0, 2):  # these marked the first layer only
        missing -= {key for key in own if key.rpartition(".")[2].startswith(surgery.MARKER)}
    if type(model).__name__ not in (model.config.architectures or []):
        prefix = f"{model.base_model_prefix}."
        missing = {key for key in missing if key.startswith(prefix) or model.base_model is model}
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    problems = {
        "missing": sorted(missing),
        "of another shape": sorted(own & mismatched),
        "unexpected": sorted(key for key in info["unexpected_keys"] if "posenc" in key),
    }
    if any(problems.values()):
        said = "; ".join(f"{what}: {', '.join(keys)}" for what, keys in problems.items() if keys)
        raise CheckpointError(f"hf_posenc: {source} does not fit {model.config.position_encoding}: {said}")


def config_digest(config: dict[str, Any]) -> str:
    """Return the digest of a saved config, without what transformers adds or rewrites when it reads one."""
    return files.digest({k: v for k, v in config.items() if k not in (DIGESTS, "auto_map") and not k.startswith("_")})


def _write_digests(folder: Path) -> None:
    """Write down what a folder holds that is about to become a checkpoint."""
    path = folder / "config.json"
    config = files.json_object(path)
    config[DIGESTS] = {path.name: config_digest(config), **files.weight_digests(folder)}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _digests(config: dict[str, Any]) -> dict[str, str]:
    """Return the digests in a saved config; none where it was saved by version 0.1, or they were removed."""
    digests = config.get(DIGESTS, {})
    if not isinstance(digests, dict) or not all(isinstance(value, str) for value in digests.values()):
        raise CheckpointError(f"hf_posenc: config.json: {DIGESTS} must map file names to digests, not be {digests!r}")
    return digests


def _check_saved_config(config: dict[str, Any]) -> None:
    """Raise CheckpointError unless a config is what was saved."""
    if _digests(config).get("config.json", own := config_digest(config)) != own:
        raise CheckpointError(
            f"hf_posenc: config.json of this {config.get('model_type')} was changed after it was saved. If that was on "
            f"purpose, remove {DIGESTS!r} from it; to change a setting for one run, pass it to from_pretrained"
        )
    if config.get("attn_implementation") != TRIPWIRE:
        raise CheckpointError(
            f"hf_posenc: config.json says attn_implementation={config.get('attn_implementation')!r}, where a patched "
            f"model says {TRIPWIRE!r}: an attention implementation is chosen when a model is loaded"
        )


def _check_saved_weights(config: dict[str, Any], folder: Path, directory: Path) -> None:
    """Raise CheckpointError unless the weights in a folder are those that were saved with its config."""
    saved, found = _digests(config), files.weight_digests(folder)
    # A file that was put beside those that were saved could be loaded in their place; one of a variant could not.
    whole = any(files.is_default_weights(name) for name in saved)
    wanted = {name for name in found if name in saved or (whole and files.is_default_weights(name))}
    strange = sorted(name for name in wanted if saved.get(name) != found[name])
    if strange:
        raise CheckpointError(
            f"hf_posenc: {', '.join(strange)} in {directory}: not what was saved with its config.json. If the weights "
            f"were rewritten on purpose, remove {DIGESTS!r} from config.json"
        )


def _overrides(options: dict[str, Any]) -> dict[str, Any]:
    """Return what a user asked of a config, of the options that an Auto class read it with."""
    return {
        k: v for k, v in options.items() if not k.startswith("_") and k not in ("return_unused_kwargs", "name_or_path")
    }


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


def heads_of(config: Any) -> dict[str, str]:
    """Return Auto class -> stock class name of every head that a family has.

    Args:
        config: ours or stock.
    """
    base = str(config.model_type).removeprefix("posenc_")
    return {auto: _one(names[base]) for auto, names in _HEADS.items() if base in names}


def _one(names: Any) -> str:
    return str(names) if isinstance(names, str) else str(names[0])


def stub_text(config: PreTrainedConfig) -> str:
    """Return the two lines of the file that `auto_map` points to."""
    names = sorted({type(config).__name__, *(f"PosEnc{name}" for name in heads_of(config).values())})
    return f"# pip install hf_posenc\nfrom hf_posenc.classes import {', '.join(names)}  # noqa: F401\n"


def __getattr__(name: str) -> Any:
    """Find the class `PosEnc<Stock>` of a supported family: checkpoints and pickles name it."""
    stock = getattr(transformers, name.removeprefix("PosEnc"), None) if name.startswith("PosEnc") else None
    if isinstance(stock, type) and issubclass(stock, PreTrainedConfig) and stock.model_type in supported_model_types():
        return config_class(stock)
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel):
        if getattr(stock.config_class, "model_type", None) in supported_model_types():
            return model_class(stock)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_auto() -> None:
    """Make the Auto classes find our class of every head of every family, and PEFT its target modules."""
    tables = [
        table
        for name, table in vars(peft.utils.constants).items()
        if name.startswith("TRANSFORMERS_MODELS_TO") and isinstance(table, dict)
    ]
    for model_type in supported_model_types():
        stock = CONFIG_MAPPING[model_type]
        if set(stock.sub_configs) & set(adapter_for(model_type).refuse):
            continue  # multimodal; has an adapter only so that a user is told why it is refused
        config = config_class(stock)
        for auto, name in heads_of(config).items():
            model = getattr(transformers, name)
            if model.config_class is stock:  # Gemma 3's own heads are of its multimodal config
                getattr(transformers, auto).register(config, model_class(model), exist_ok=True)
        for table in tables:
            if model_type in table:
                table.setdefault(f"posenc_{model_type}", table[model_type])
