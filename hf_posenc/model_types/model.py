"""Model classes of patched models: made on demand as `(PosEncMixin, LlamaForCausalLM)`."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import initialization as init

from .. import files, hub
from ..errors import CheckpointError, HfPosencError, UnsupportedModelError, WeightShapeError
from ..families.base import base_model_type
from ..layer_state import on_decoder
from ..live.base_model import decoder_of
from ..live.state import Patch, patch_of
from ..live.undo import Undo
from ..live.wrappers import gathered, is_spread, packed_in_place
from ..modules import PositionModule
from ..patching.layers import MARKER
from ..patching.place import operate
from ..patching.plan import make_plan, needs_own_attention
from ..registry import family_for, supported_model_types
from ..schemes.base import Scheme
from ..upstream import NAME
from ..upstream.attention import SPLIT_HEADS
from ..upstream.channel import carrying_forward
from ..upstream.derived import revive, stock_class
from .adapters import WHERE, check_adapter, name_base, require_same_base
from .config import CLASSES, READ, STUB, PosEncConfigMixin, config_class, name_of, stock_config, stub_text
from .digests import check_no_adapter, check_saved_weights, config_digest, write_digests
from .entry import ENTRY, check_version, entry_of, is_older, schemes_of_config, write_out
from .guards import UNREGISTERED
from .stamp import stamped

_PUSH_OPTIONS = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


class PosEncMixin:
    """In front of a stock model class: puts the schemes in on loading, guards the attention implementation."""

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        """Build the stock model and put in the schemes that the config names.

        Args:
            config: of a class made by `config_class`.
            *args: handed on.
            **kwargs: handed on.
        """
        read = config.__dict__.pop(READ, None)
        schemes_of_config(config)
        check_version(config)
        write_out(config)
        schemes = schemes_of_config(config)
        attends = self._needs_own_attention(config)
        backend = config._attn_implementation_internal
        if attends and any(kind in str(backend) for kind in ("flash", "paged")):
            raise ValueError(would_drop(schemes, backend))
        if backend in (NAME, UNREGISTERED):  # the stock constructor refuses them, as it should
            config._attn_implementation_internal = None
        try:
            super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
            if read is None or args or kwargs or isinstance(error, HfPosencError):  # not, or not only, of a checkpoint
                raise
            raise CheckpointError(
                f"hf_posenc: config.json of {config.model_type!r} makes no {type(self).__name__}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if lacks_loss_type(self):
            self.loss_type = "ForCausalLM"
        base = self.base_model
        if "_posenc_patch" not in base.__dict__:
            try:
                plan = make_plan(base, schemes, "auto")
            except HfPosencError:
                raise
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise CheckpointError(f"hf_posenc: config.json of {config.model_type!r}: {error}") from error
            patch = Patch(plan.schemes, "auto", None, plan.base.found.layers, plan.limit(), plan.attends)
            object.__setattr__(base, "_posenc_patch", patch)
            config.position_encoding = {**config.position_encoding, "schemes": entry_of(plan.schemes)["schemes"]}
            owners = operate(Undo(), plan)
            if not next(base.parameters()).is_meta:  # from_config; from_pretrained initialises what it does not load
                for owner in owners:
                    with gathered(owner):
                        owner.reset_parameters()
            for module in base.modules():
                if isinstance(module, PreTrainedModel) and not isinstance(module, PosEncMixin):
                    module.__class__ = model_class(type(module), stock_config(config))
        elif attends:
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
        if raw:
            check_no_adapter(folder, directory)
        if kwargs.get("state_dict") is None and kwargs.get("gguf_file") is None:
            check_saved_weights(raw, folder, directory)
        if isinstance(config := kwargs.get("config"), PosEncConfigMixin):
            read = config.__dict__.get(READ)
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
        kwargs.setdefault("use_safetensors", True)  # what we save; other formats are read by unpickling
        try:
            model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        except SafetensorError as error:
            raise CheckpointError(f"hf_posenc: the weights of {source} cannot be read: {error}") from error
        check_loaded(model, info, source)
        if model._posenc_attends() and (model.tp_size or 1) > 1:
            names = " and ".join(scheme.name for scheme in schemes_of_config(model.config))
            raise UnsupportedModelError(f"{names}: {SPLIT_HEADS}")
        return model, info

    @classmethod
    def _finalize_model_loading(cls, model: Any, load_config: Any, loading_info: Any) -> Any:
        """Check the sizes of what was loaded before transformers takes memory for what was not.

        Args:
            model: what was not loaded is still on the meta device.
            load_config: transformers' record of the call.
            loading_info: transformers' account of the keys so far.
        """
        source, mismatched = load_config.pretrained_model_name_or_path, loading_info.mismatched_keys
        if not load_config.ignore_mismatched_sizes:
            check_shapes(model, mismatched, source)
        missing = position_keys(model) & set(loading_info.missing_keys)
        unexpected = loading_info.unexpected_keys
        info = {"missing_keys": missing, "mismatched_keys": mismatched, "unexpected_keys": unexpected}
        check_loaded(model, info, source)
        return super()._finalize_model_loading(model, load_config, loading_info)  # type: ignore[misc]

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        tokenizer: Any = None,
        push_to_hub: bool = False,
        **kw: Any,
    ) -> None:
        """Save as transformers does, with the guards, the stub and a model card, all or nothing.

        A kill at any moment leaves the old checkpoint or the new one. Other files of the directory stay; a README.md
        that is there is kept.

        Args:
            save_directory: where to.
            *args: handed on.
            tokenizer: saved with the model, its `model_max_length` set to what the scheme allows.
            push_to_hub: upload what was saved, as `push_to_hub` does.
            **kw: of `save_pretrained` in transformers, and of `push_to_hub`.

        Raises:
            UnsupportedModelError: if what would be saved could not be loaded again. Layers were added, changed or
                removed since the model was patched; weights were quantised in place; FSDP or ZeRO-3 has spread the
                parameters and no `state_dict` is given; or the `state_dict` lacks tensors of this model, or has others.
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
        if state is None and is_spread(self):
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
        packed = packed_in_place(self) if getattr(self, "hf_quantizer", None) is None else None
        if state is None and packed is not None:
            raise UnsupportedModelError(
                f"this model was quantised in place ({packed} is packed), and what is saved could not be loaded: save "
                "it before that, and load it with hf_posenc.from_pretrained(..., quantization_config=...)"
            )
        if state is not None:
            self._check_state(state, directory)
        with files.staged(directory) as folder:
            kw["save_original_format"] = False  # our classes read the names and shapes that the model has
            super(PosEncMixin, stamped(self, state)).save_pretrained(folder, *args, **kw)  # type: ignore[misc]
            if (folder / "config.json").is_file():  # not where only an adapter is saved, or another process writes
                (folder / f"{STUB}.py").write_text(stub_text(self.config), encoding="utf-8")
                if not (directory / "README.md").exists():
                    text = hub.card(self.config.to_diff_dict())
                    (folder / "README.md").write_text(text, encoding="utf-8")
            if tokenizer is not None:
                tokenizer = copy.deepcopy(tokenizer)
                if (length := getattr(self.config, "max_position_embeddings", None)) is not None:
                    tokenizer.model_max_length = length
                tokenizer.save_pretrained(folder)
            if (folder / "config.json").is_file():
                write_digests(folder)
        if push_to_hub:
            hub.push(directory, repo_id, **options)

    def _check_state(self, state: dict[str, Any], directory: Path) -> None:
        """Raise UnsupportedModelError unless a state dict has exactly the tensors of this model.

        Tied weights may be there once. transformers' Trainer saves an empty one where DeepSpeed keeps the weights.
        """
        if getattr(self, "_hf_peft_config_loaded", False):  # it holds an adapter
            return
        if not state and not any(files.is_default_weights(path.name) for path in directory.glob("*.safetensors*")):
            return
        tied: dict[int, set[str]] = {}
        for name, tensor in tensors_of(self):
            tied.setdefault(id(tensor), set()).add(name)
        ignored = set(self._keys_to_ignore_on_save or ())
        lacking = sorted(min(names) for names in tied.values() if not names & (ignored | state.keys()))
        strange = sorted(state.keys() - {name for names in tied.values() for name in names})
        if getattr(self, "hf_quantizer", None) is not None:  # it has names of its own beside the weights
            strange = []
        problems = [
            f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for what, names in (("lacks", lacking), ("has", strange))
            if names
        ]
        if problems:
            raise UnsupportedModelError(
                f"this state_dict is not of this {type(self).__name__}, and what is saved could not be loaded: it "
                f"{', and '.join(problems)}. Give model.state_dict() of this model, without a wrapper around it, or "
                "leave it out"
            )

    def _check_layers(self) -> None:
        """Raise UnsupportedModelError unless the layers are patched, and as many as the config says."""
        decoder = decoder_of(self)
        layers = on_decoder(decoder).layers
        if (problem := layers.problem(decoder)) is not None:
            raise UnsupportedModelError(problem)
        count = len(decoder.get_submodule(layers.layers))
        if count != self.config.num_hidden_layers:
            raise UnsupportedModelError(
                f"the model has {count} layers, its config says {self.config.num_hidden_layers}: set "
                f"config.num_hidden_layers = {count} and what else the config lists by layer (layer_types, ...)"
            )

    def push_to_hub(
        self, repo_id: str, *, tokenizer: Any = None, max_shard_size: int | str = "50GB", **options: Any
    ) -> Any:
        """Upload the model in one commit, with the guards, the stub and a card that says how to load it.

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

    def load_adapter(self, peft_model_id: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Load an adapter as transformers does, if it was trained on a base that is patched like this model.

        Args:
            peft_model_id: the adapter's directory, or a Hub id.
            *args: as transformers has them.
            **kwargs: as transformers has them.

        Returns:
            What transformers' method returns.

        Raises:
            CheckpointError: if the adapter was trained on another base, or does not say on which.
            OSError: if there is no such adapter, or it cannot be read.
        """
        load: Any = super().load_adapter  # type: ignore[misc]  # the stock class is behind us
        given = inspect.signature(load).bind(peft_model_id, *args, **kwargs).arguments
        options, config = given.get("kwargs", {}), given.get("peft_config")
        whole = vars(given.get("load_config") or SimpleNamespace())
        adapter = peft_model_id or whole.get("pretrained_model_name_or_path")
        if config is not None:
            said = config if isinstance(config, dict) else config.to_dict()
            if ENTRY in (said.get("auto_mapping") or {}):
                require_same_base(self, said, adapter or "peft_config", {})
        elif adapter is not None:
            where = {
                **(whole.get("download_kwargs") or {}),
                **(options.get("download_kwargs") or {}),
                **(given.get("adapter_kwargs") or {}),
            }
            if given.get("local_files_only"):
                where["local_files_only"] = True
            check_adapter(self, adapter, **{key: value for key, value in where.items() if key in WHERE})
        return load(peft_model_id, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; PEFT leaves the configs of its adapters here, and each is made to name the base.

        Warns (UserWarning) of an adapter that neither trains nor saves position parameters which nothing has trained.
        """
        if name == "peft_config" and isinstance(value, dict):
            for adapter, config in value.items():
                warn_of_frozen_positions(self, config)
                value[adapter] = name_base(self, config)
        super().__setattr__(name, value)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, PositionModule):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]
        for name, buffer in module._buffers.items():
            if name.startswith(MARKER) and buffer is not None:
                init.zeros_(buffer)

    def _posenc_attends(self) -> bool:
        """Return whether attention has to be that of this package."""
        return self._needs_own_attention(self.config)

    @staticmethod
    def _needs_own_attention(config: PreTrainedConfig) -> bool:
        return needs_own_attention(family_for(base_model_type(config)), schemes_of_config(config))

    def _check_and_adjust_attn_implementation(
        self, attn_implementation: str | None, is_init_check: bool = False, allow_all_kernels: bool = False
    ) -> str:
        """Refuse what would drop the scheme; called by the stock constructor and by `set_attn_implementation`."""
        if self._posenc_attends() and not is_init_check and attn_implementation != NAME:
            raise ValueError(would_drop(schemes_of_config(self.config), attn_implementation))
        if attn_implementation == NAME:
            return NAME
        return super()._check_and_adjust_attn_implementation(  # type: ignore[misc]
            attn_implementation, is_init_check=is_init_check, allow_all_kernels=allow_all_kernels
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and copy by the stock class, since this one is made on demand."""
        return revive, (model_class, stock_class(type(self), PosEncMixin), stock_config(self.config)), self.__dict__

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Do nothing: transformers would copy our source into the next checkpoint."""


def warn_of_frozen_positions(model: PreTrainedModel, config: Any) -> None:
    """Warn if an adapter leaves position parameters at the values that they started with.

    Args:
        model: patched, with the adapter inside.
        config: of the adapter. One that names its base is of `lora_config` or `name_base`, whose user chose.
    """
    base: Any = model.base_model
    patch, calibrated = patch_of(model), hub.CALIBRATION in model.config.position_encoding
    if patch is None or calibrated or config.inference_mode or ENTRY in (config.auto_mapping or {}):
        return
    whole = tuple(getattr(config, "modules_to_save", None) or ())
    frozen = [
        name
        for name, parameter in base.named_parameters()
        if patch.started.get(name) == parameter._version and not parameter.requires_grad and not _within(name, whole)
    ]
    if frozen:
        owners = sorted({name.split(".")[-2] for name in frozen})
        warnings.warn(
            f"this adapter neither trains nor saves the position parameters of {patch.name} ({len(frozen)} tensors, "
            f"{frozen[0]} the first), which nothing has trained or calibrated yet: take hf_posenc.lora_config(model), "
            f"name modules_to_save={owners} in the config, or calibrate the model first",
            stacklevel=3,
        )


def _within(parameter: str, modules: tuple[str, ...]) -> bool:
    """Return whether a parameter is in one of the modules that PEFT finds by the ends of their names."""
    parts = parameter.split(".")[:-1]
    return bool(modules) and any(".".join(parts[:end]).endswith(modules) for end in range(1, len(parts) + 1))


def would_drop(schemes: Sequence[Scheme], attn_implementation: str | None) -> str:
    """Return why schemes on attention scores refuse an attention implementation."""
    names = [name for scheme in schemes if (name := scheme.acts_on.dropped_by_stock_attention(scheme)) is not None]
    if not names:
        return (
            f"attn_implementation={attn_implementation!r} would leave {' and '.join(each.name for each in schemes)} "
            f"without positions, which reach the layers of this family only through the attention {NAME!r}: keep it, "
            "or unpatch the model first"
        )
    return (
        f"attn_implementation={attn_implementation!r} would drop {' and '.join(names)}, which changes attention "
        f"scores: keep {NAME!r} (engines are chosen with patch_model(..., attention=...)), or unpatch the model first"
    )


def lacks_loss_type(model: Any) -> bool:
    """Return whether transformers cannot tell a causal language model's loss from its class name.

    It then takes the right one and warns, which breaks `torch.compile(fullgraph=True)`: GPT2LMHeadModel.
    """
    return model.loss_type is None and model.can_generate()


_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What FSDP1 and activation checkpointing put into names of modules, and leave out of those in a state dict."""


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a model's state dict holds, by name, tied weights by each of their names; nothing is gathered."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for wrapper in _WRAPPERS:
            prefix = f"{prefix}.".replace(wrapper, "").removesuffix(".")
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, tensor


def position_keys(model: nn.Module) -> set[str]:
    """Return the state-dict keys that belong to a patched model's scheme: its parameters and its marker."""
    return {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in {**module._parameters, **module._buffers}
        if isinstance(module, PositionModule) or key.startswith(MARKER)
    }


def check_shapes(model: PreTrainedModel, mismatched: Iterable[Any], source: Any) -> None:
    """Raise WeightShapeError if weights have other shapes than the config asks for.

    Args:
        model: that the config makes.
        mismatched: of each such weight its name, its shape, and the one that is wanted.
        source: of the weights, for the message.
    """
    if said := ", ".join(str(each) for each in sorted(mismatched, key=str)):
        raise WeightShapeError(
            f"hf_posenc: weights of {source} have another shape than {model.config.position_encoding} and the rest "
            f"of its config ask for (key, found, wanted): {said}"
        )


def check_sizes(
    cls: type[PreTrainedModel], config: PreTrainedConfig, found: dict[str, dict[str, Any]], source: Any
) -> None:
    """Check that a config makes a model, and the headers of the weights beside it; no weight is read or allocated.

    Args:
        cls: our class that the config names.
        config: as it was read.
        found: what the headers of its weights say, by `files.tensors`; if empty, the config alone is checked.
        source: how to call it in messages.

    Raises:
        CheckpointError: if the config makes no model, or position parameters are missing, unexpected or no floats.
        WeightShapeError: if weights have other shapes than the config asks for.
    """
    layers = config.num_hidden_layers
    marked = {name.split(f".{MARKER}")[0] for name in found if f".{MARKER}" in name}
    if found and not is_older(config) and len(marked) != layers:  # a loop over that many layers could take for ever
        raise CheckpointError(
            f"hf_posenc: config.json of {source} says {layers} layers, its weights have {len(marked)}"
        )
    try:
        with torch.device("meta"):
            model = cls(config)
    except HfPosencError:
        raise
    except Exception as error:  # whatever a stock class finds wrong, of any type
        raise CheckpointError(
            f"hf_posenc: config.json of {source} makes no {cls.__name__}: {type(error).__name__}: {error}"
        ) from error
    if not found:
        return
    own, wanted = position_keys(model), dict(tensors_of(model))
    shapes = {name: list(tensor.shape) for name, tensor in wanted.items()}
    check_shapes(
        model,
        [
            (name, each["shape"], shapes[name])
            for name, each in found.items()
            if shapes.get(name, each["shape"]) != each["shape"]
        ],
        source,
    )
    info = {"missing_keys": own - set(found), "mismatched_keys": (), "unexpected_keys": set(found) - set(wanted)}
    check_loaded(model, info, source)


def check_loaded(model: PreTrainedModel, info: dict[str, Any], source: Any) -> None:
    """Check transformers' account of what was loaded.

    A head that another architecture does not have starts at random, as in transformers; nothing else may.

    Raises:
        CheckpointError: if a weight was missing, or a position parameter left over or of another shape.
    """
    own = position_keys(model)
    missing = set(info["missing_keys"])
    if is_older(model.config):
        missing -= {key for key in own if key.rpartition(".")[2].startswith(MARKER)}
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


def _overrides(options: dict[str, Any]) -> dict[str, Any]:
    """Return what a user asked of a config, of the options that an Auto class read it with."""
    return {
        k: v for k, v in options.items() if not k.startswith("_") and k not in ("return_unused_kwargs", "name_or_path")
    }


def model_class(stock: type[PreTrainedModel], config: type[PreTrainedConfig] | None = None) -> type[PreTrainedModel]:
    """Return our model class in front of a stock one.

    Args:
        stock: model class.
        config: stock config class of the model; that of the model class's own model type can be left out.
    """
    own = stock.config_class
    return _model_class(stock, own if config is None or config.model_type == own.model_type else config)


@functools.cache
def _model_class(stock: type[PreTrainedModel], stock_config: type[PreTrainedConfig]) -> type[PreTrainedModel]:
    from transformers.utils import output_capturing

    config = config_class(stock_config)
    members: dict[str, Any] = {"__module__": CLASSES, "config_class": config}
    model_type = stock_config.model_type
    if model_type in supported_model_types() and (family := family_for(model_type)).positions_in_mask:
        members["forward"] = carrying_forward(stock, family)
    cls = type(name_of(stock, stock_config), (PosEncMixin, stock), members)
    # Which outputs a model can record is looked up by its class; without this, output_attentions gives None.
    dict.__setitem__(output_capturing._CAN_RECORD_REGISTRY, str(cls), cls._can_record_outputs)
    return cls
