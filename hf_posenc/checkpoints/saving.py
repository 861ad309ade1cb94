"""Save a patched model as a complete checkpoint or not at all, load it, and check that weights and config fit."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationMethod

from ..core.errors import CheckpointError, UnsupportedModelError
from ..core.layer_state import MARKER, on_decoder
from ..core.modules import modules_of_schemes
from ..families.base import language_config
from ..model.base_model import decoder_of
from ..model.obstacles import check_unquantized, is_spread
from ..patching.hooks import problem_of_layers
from ..transformers_glue.attention import SPLIT_HEADS
from ..transformers_glue.derived_classes import made_class, stock_class
from . import files, hub
from .cards import card
from .class_names import STUB, StockModel, stock_classes, stub_text
from .config import stock_config
from .scheme_entry import schemes_of_config

_PUSH_OPTIONS = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")

_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Prefixes that FSDP1 and activation checkpointing add to the names of modules, but not to the keys of a state dict."""


class CheckpointMixin(StockModel):
    """The part of our model classes that loads, saves and uploads models."""

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
            CheckpointError: if the config's scheme entry or a weight is missing, a weight has another shape than the
                config asks for, or a position parameter is unexpected.
            UnsupportedModelError: for tensor parallelism, if the scheme changes attention scores.
        """
        path = source = pretrained_model_name_or_path
        directory = Path(path or "") / (kwargs.get("subfolder") or "")
        if path is not None and directory.is_dir():
            kwargs.pop("subfolder", None)
            source = files.current(directory)
            files.check_folder(source)
            if source != directory and kwargs.get("config") is not None:
                raise CheckpointError(
                    f"hf_posenc: a save into {directory} was interrupted, and its config.json may be older than the "
                    "weights: load it with hf_posenc.from_pretrained, or save it again"
                )
        kwargs.setdefault("use_safetensors", True)  # other formats would be unpickled
        ignores = kwargs.pop("ignore_mismatched_sizes", False)
        options = {**kwargs, "output_loading_info": True, "ignore_mismatched_sizes": True}
        model, info = super().from_pretrained(source, *args, **options)
        check_loaded(model, info, path, ignores_shapes=ignores)
        if model.attends_by_ours(model.config) and (model.tp_size or 1) > 1:
            names = " and ".join(scheme.name for scheme in schemes_of_config(model.config))
            raise UnsupportedModelError(f"{names}: {SPLIT_HEADS}")
        if path is not None:
            model.config.name_or_path = model.name_or_path = str(path)
        return (model, info) if output_loading_info else model

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        push_to_hub: bool = False,
        **kw: Any,
    ) -> None:
        """Save the model as transformers does, with the guards, the stub and a model card, all or nothing.

        If the process is killed, the directory holds the old checkpoint or the new one. Its other files stay. So does
        an existing README.md.

        Args:
            save_directory: folder of the checkpoint.
            is_main_process: whether this process writes; False for all others of a distributed run.
            state_dict: the tensors to save, with the names of this model's; None means the model's own.
            tokenizer: tokenizer to save with the model. Its `model_max_length` is set to the scheme's limit.
            push_to_hub: whether to upload the checkpoint too, as the method `push_to_hub` does.
            **kw: options of `save_pretrained` in transformers, and of `push_to_hub`.

        Raises:
            UnsupportedModelError: if the checkpoint could not be loaded again: the model's class is neither one of
                transformers nor registered with its Auto classes; layers were added, changed or removed since the model
                was patched; weights were quantised in place; FSDP or ZeRO-3 has spread the parameters and `state_dict`
                is missing; or `state_dict` lacks tensors of the model, or has other ones.
        """
        _check_layers(self)
        directory = Path(save_directory)
        options = {key: kw.pop(key) for key in _PUSH_OPTIONS if key in kw}
        repo_id = kw.pop("repo_id", None) or directory.name
        # Every process writes its shards of a distributed checkpoint, which serves only to resume.
        if kw.get("distributed_checkpoint") or not is_main_process:
            super().save_pretrained(save_directory, is_main_process, state_dict, **kw)
            return
        _check_loadable(self, state_dict, directory)
        with files.staged(directory) as folder:
            kw["save_original_format"] = False  # our classes read the names and shapes that the model has
            super().save_pretrained(folder, state_dict=state_dict, **kw)
            # No config was written if only an adapter is saved, or another process writes.
            has_config = (folder / "config.json").is_file()
            if has_config:
                (folder / f"{STUB}.py").write_text(stub_text(stock_config(self.config)), encoding="utf-8")
                if not (directory / "README.md").exists():
                    (folder / "README.md").write_text(card(self.config.to_diff_dict()), encoding="utf-8")
            if tokenizer is not None:
                tokenizer = copy.deepcopy(tokenizer)
                if (length := getattr(language_config(self.config), "max_position_embeddings", None)) is not None:
                    tokenizer.model_max_length = length
                tokenizer.save_pretrained(folder)
        if has_config:
            self.name_or_path = str(directory)  # PEFT writes it into adapters, as their base
        if push_to_hub:
            hub.push(directory, repo_id, **options)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_shard_size: int | str = "50GB",
        **options: Any,
    ) -> CommitInfo:
        """Upload the model in one commit, with the guards, the stub and a card that says how to load the model.

        Args:
            repo_id: `name` or `organization/name`; made if it does not exist.
            tokenizer: tokenizer to upload with the model.
            max_shard_size: largest size of a weight file, e.g. `"5GB"`.
            **options: `commit_message`, `commit_description`, `private`, `token`, `revision`, `create_pr` and `tags`,
                as in transformers.

        Returns:
            huggingface_hub's CommitInfo.

        Raises:
            TypeError: for any other option.
        """
        with tempfile.TemporaryDirectory() as folder:
            name = self.name_or_path
            self.save_pretrained(folder, tokenizer=tokenizer, max_shard_size=max_shard_size)
            self.name_or_path = name
            return hub.push(Path(folder), repo_id, **options)


def _check_layers(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError unless all layers are patched and the config has their number."""
    decoder: Any = decoder_of(model)
    if (problem := problem_of_layers(decoder)) is not None:
        raise UnsupportedModelError(problem)
    count = len(decoder.get_submodule(on_decoder(decoder).layers))
    configured = language_config(model.config).num_hidden_layers
    if count != configured:
        raise UnsupportedModelError(
            f"the model has {count} layers, its config says {configured}: set "
            f"config.num_hidden_layers = {count} and what else the config lists by layer (layer_types, ...)"
        )


def _check_loadable(model: PreTrainedModel, state: dict[str, Tensor] | None, directory: Path) -> None:
    """Raise UnsupportedModelError if the saved model could not be loaded.

    Args:
        model: the model to save.
        state: the caller's state dict, or None for the model's.
        directory: folder of the checkpoint.
    """
    made, stock = (each(type(model), CheckpointMixin) for each in (made_class, stock_class))
    config = stock_config(model.config)
    if stock_classes(made.__name__) != (config, stock) or config.model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"nobody could find the classes of this {stock.__name__} again: call AutoConfig.register("
            f"{config.model_type!r}, {config.__name__}) and AutoModelForCausalLM.register({config.__name__}, "
            f"{stock.__name__}) here, and wherever the checkpoint is loaded"
        )
    if state is None and is_spread(model):
        raise UnsupportedModelError(
            "the parameters of this model are spread over processes: on every process call state = "
            "accelerator.get_state_dict(model), then on the main process accelerator.unwrap_model(model)"
            ".save_pretrained(directory, state_dict=state)"
        )
    if any("_orig_mod" in name for name in (dict(model.named_modules()) if state is None else state)):
        raise UnsupportedModelError(
            "torch.compile(module) has renamed weights of this model, so no model could load them: compile in place "
            "(module.compile()), or save accelerate's unwrap_model(model, keep_torch_compile=False)"
        )
    if getattr(model, "quantization_method", None) == QuantizationMethod.GGUF or (
        state is None and getattr(model, "hf_quantizer", None) is None
    ):
        check_unquantized(model, "save the model")
    if state is not None:
        _check_state(model, state, directory)


def _check_state(model: PreTrainedModel, state: dict[str, Tensor], directory: Path) -> None:
    """Raise UnsupportedModelError unless a state dict has exactly the tensors of a model.

    Tied weights may occur under one of their names. An empty state dict is allowed in a folder without weights, because
    transformers' Trainer passes one if DeepSpeed saves the weights.
    """
    if getattr(model, "_hf_peft_config_loaded", False):  # the state dict holds an adapter
        return
    if not state and not any(files.WEIGHTS.fullmatch(path.name) for path in directory.glob("*.safetensors*")):
        return
    names_of_tensor: dict[int, set[str]] = {}  # by hand, because `state_dict()` would gather from other processes
    for prefix, module in model.named_modules(remove_duplicate=False):
        for wrapper in _WRAPPERS:
            prefix = f"{prefix}.".replace(wrapper, "").removesuffix(".")
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                names_of_tensor.setdefault(id(tensor), set()).add(f"{prefix}.{name}" if prefix else name)
    found = state.keys() | set(model._keys_to_ignore_on_save or ())
    lacking = sorted(min(names) for names in names_of_tensor.values() if not names & found)
    is_quantised = getattr(model, "hf_quantizer", None) is not None  # quantizers add keys
    strange = [] if is_quantised else sorted(state.keys() - set().union(*names_of_tensor.values()))
    if lacking or strange:
        raise UnsupportedModelError(
            f"this state_dict is not of this {type(model).__name__}, and the checkpoint could not be loaded: it lacks "
            f"{len(lacking)} of its tensors ({', '.join(lacking[:3])}) and has {len(strange)} others "
            f"({', '.join(strange[:3])}). Pass model.state_dict() of this model, without a wrapper around the model, "
            "or leave state_dict out"
        )


def position_keys(model: nn.Module) -> set[str]:
    """Return the state-dict keys of a patched model's position parameters and markers."""
    of_schemes = modules_of_schemes(model)
    return {
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        for key in {**module._parameters, **module._buffers}
        if name in of_schemes or key.startswith(MARKER)
    }


def check_loaded(model: PreTrainedModel, info: dict[str, Any], source: object, *, ignores_shapes: bool = False) -> None:
    """Check transformers' loading info.

    Only the head may be missing, if the checkpoint was saved by a class with another head. It then starts at random.

    Args:
        model: the loaded model.
        info: the loading info: `missing_keys`, `mismatched_keys` and `unexpected_keys`.
        source: name of the checkpoint in the message.
        ignores_shapes: whether weights that are no position parameters may have another shape.

    Raises:
        CheckpointError: if a weight is missing or has another shape, or a position parameter is unexpected.
    """
    missing = set(info["missing_keys"])
    if type(model).__name__ not in (model.config.architectures or []):
        prefix = f"{model.base_model_prefix}."
        missing = {key for key in missing if key.startswith(prefix) or model.base_model is model}
    mismatched = {key if isinstance(key, str) else key[0] for key in info["mismatched_keys"]}
    problems = {
        "missing": missing,
        "of another shape": mismatched & position_keys(model) if ignores_shapes else mismatched,
        "unexpected": {key for key in info["unexpected_keys"] if "posenc" in key},
    }
    if any(problems.values()):
        listed = "; ".join(f"{problem}: {', '.join(sorted(keys))}" for problem, keys in problems.items() if keys)
        raise CheckpointError(f"hf_posenc: {source} does not fit {model.config.position_encoding}: {listed}")
