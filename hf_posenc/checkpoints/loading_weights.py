"""Load the weights of a patched checkpoint, and check that they fit its config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel

from ..errors import CheckpointError, UnsupportedModelError, WeightShapeError
from ..modules import modules_of_schemes
from ..patching.patched_layers import MARKER
from ..upstream.attention import SPLIT_HEADS
from . import files
from .compat_0_1 import was_saved_by_0_1
from .config import READ, ConfigMixin
from .digests import check_no_adapter, check_saved_weights, config_digest
from .headers import json_object
from .scheme_entry import schemes_of_config
from .stock_checkpoints import StockModel

Loaded = tuple[PreTrainedModel, dict[str, Any]]
"""A model, and transformers' loading info: missing, unexpected and mismatched keys."""

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Prefixes that FSDP1 and activation checkpointing add to the names of modules, but not to the keys of a state dict."""


class LoadingMixin(StockModel):
    """The part of our model classes that loads checkpoints."""

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *args: object,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Load a checkpoint as transformers does, and check that no position parameter is missing.

        Args:
            pretrained_model_name_or_path: a directory or a Hub id.
            *args: passed to the method of transformers.
            output_loading_info: whether to return also transformers' loading info (missing keys and so on).
            **kwargs: passed to the method of transformers.

        Returns:
            The model in eval mode, or a pair of model and loading info.

        Raises:
            CheckpointError: if the config's scheme entry or a weight is missing, if a position parameter is unexpected,
                or if the files were not saved together.
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
    def _from_folder(cls, folder: Path, directory: Path, *args: object, **kwargs: object) -> Loaded:
        """Load from a folder that nobody changes meanwhile.

        Args:
            folder: the folder to read, as `files.read` passes it.
            directory: the checkpoint's folder, for messages.
            *args: as for `from_pretrained`.
            **kwargs: as for `from_pretrained`.
        """
        raw = json_object(folder / "config.json") if (folder / "config.json").exists() else {}
        if raw:
            check_no_adapter(folder, directory)
        if kwargs.get("state_dict") is None and kwargs.get("gguf_file") is None:
            check_saved_weights(raw, folder, directory)
        if isinstance(config := kwargs.get("config"), ConfigMixin) and READ in config.__dict__:
            digest, options, as_read = config.__dict__[READ]
            if digest != config_digest(raw):  # the checkpoint was saved again since an Auto class read the config
                if config.to_dict() != as_read:
                    raise CheckpointError(
                        f"hf_posenc: {directory} was saved anew after its config had been read, and the config that "
                        "was passed has been changed: read the config again, or pass the changes to from_pretrained"
                    )
                kwargs["config"] = cls.config_class.from_pretrained(folder, **_config_overrides(options))
        model, info = cls._from_pretrained(folder, directory, *args, **kwargs)
        if folder != directory and "disk" in (getattr(model, "hf_device_map", None) or {}).values():
            raise CheckpointError(
                f"hf_posenc: a save into {directory} was interrupted before its files were moved into place, and "
                "weights offloaded to disk could not be read later: call hf_posenc.checkpoints.files.complete on the "
                "folder first"
            )
        return model, info

    @classmethod
    def _from_pretrained(cls, path: object, source: object, *args: object, **kwargs: object) -> Loaded:
        """Load a checkpoint as transformers does, and check the loading info.

        Args:
            path: the folder or Hub id to read, or None.
            source: name of the checkpoint in messages.
            *args: as for `from_pretrained`.
            **kwargs: as for `from_pretrained`.
        """
        kwargs.setdefault("use_safetensors", True)  # other formats would be unpickled
        try:
            model, info = super().from_pretrained(path, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise CheckpointError(f"hf_posenc: the weights of {source} cannot be read: {error}") from error
        check_loaded(model, info, source)
        if model._posenc_attends() and (model.tp_size or 1) > 1:
            names = " and ".join(scheme.name for scheme in schemes_of_config(model.config))
            raise UnsupportedModelError(f"{names}: {SPLIT_HEADS}")
        return model, info

    @classmethod
    def _finalize_model_loading(cls, model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
        """Check the loaded weights before transformers allocates memory for missing ones.

        Args:
            model: the model, with missing parameters still on the meta device.
            load_config: the call's options, as transformers records them.
            loading_info: transformers' loading info so far.
        """
        source, mismatched = load_config.pretrained_model_name_or_path, loading_info.mismatched_keys
        if not load_config.ignore_mismatched_sizes:
            check_shapes(model, mismatched, source)
        missing = position_keys(model) & set(loading_info.missing_keys)
        unexpected = loading_info.unexpected_keys
        info = {"missing_keys": missing, "mismatched_keys": mismatched, "unexpected_keys": unexpected}
        check_loaded(model, info, source)
        return super()._finalize_model_loading(model, load_config, loading_info)


def _config_overrides(options: dict[str, object]) -> dict[str, Any]:
    """Return the config settings that a user passed among the options of an Auto class."""
    return {
        k: v for k, v in options.items() if not k.startswith("_") and k not in ("return_unused_kwargs", "name_or_path")
    }


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a model's state dict, tied weights once for each of their names.

    Nothing is gathered from other processes.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        for wrapper in _WRAPPERS:
            prefix = f"{prefix}.".replace(wrapper, "").removesuffix(".")
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, tensor


def position_keys(model: nn.Module) -> set[str]:
    """Return the state-dict keys of a patched model's position parameters and markers."""
    of_schemes = modules_of_schemes(model)
    return {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in {**module._parameters, **module._buffers}
        if name in of_schemes or key.startswith(MARKER)
    }


def check_shapes(model: PreTrainedModel, mismatched: Iterable[object], source: object) -> None:
    """Raise WeightShapeError if weights have other shapes than the config asks for.

    Args:
        model: the model that was made from the config.
        mismatched: a tuple for each such weight: its name, its shape, and the shape in the model.
        source: name of the checkpoint in the message.
    """
    if listed := ", ".join(str(mismatch) for mismatch in sorted(mismatched, key=str)):
        raise WeightShapeError(
            f"hf_posenc: weights of {source} have another shape than {model.config.position_encoding} and the rest "
            f"of its config ask for (key, found, wanted): {listed}"
        )


def check_loaded(model: PreTrainedModel, info: dict[str, Any], source: object) -> None:
    """Check transformers' loading info.

    Only the head may be missing, if the checkpoint was saved by a class with another head. It then starts at random.

    Args:
        model: the loaded model.
        info: the loading info: `missing_keys`, `mismatched_keys` and `unexpected_keys`.
        source: name of the checkpoint in the message.

    Raises:
        CheckpointError: if a weight is missing, or a position parameter is unexpected or has another shape.
    """
    own_keys = position_keys(model)
    missing = set(info["missing_keys"])
    if was_saved_by_0_1(model.config):  # version 0.1 marked only the first layer
        missing -= {key for key in own_keys if key.rpartition(".")[2].startswith(MARKER)}
    if type(model).__name__ not in (model.config.architectures or []):
        prefix = f"{model.base_model_prefix}."
        missing = {key for key in missing if key.startswith(prefix) or model.base_model is model}
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    problems = {
        "missing": sorted(missing),
        "of another shape": sorted(own_keys & mismatched),
        "unexpected": sorted(key for key in info["unexpected_keys"] if "posenc" in key),
    }
    if any(problems.values()):
        listed = "; ".join(f"{problem}: {', '.join(keys)}" for problem, keys in problems.items() if keys)
        raise CheckpointError(f"hf_posenc: {source} does not fit {model.config.position_encoding}: {listed}")
