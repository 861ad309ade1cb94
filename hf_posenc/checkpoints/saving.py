"""Save a patched model as a complete checkpoint, or not at all."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..errors import UnsupportedModelError
from ..families.base import language_config
from ..layer_state import on_decoder
from ..live.base_model import decoder_of
from ..live.obstacles import is_spread, packed_in_place
from . import files, hub
from .cards import card
from .class_names import STUB, stub_text
from .config import stock_config
from .digests import write_digests
from .headers import WEIGHTS
from .loading_weights import named_tensors
from .save_mark import stamped
from .stock_checkpoints import StockModel

_PUSH_OPTIONS = ("commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


class SavingMixin(StockModel):
    """The part of our model classes that saves and uploads models."""

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *args: Any,
        tokenizer: PreTrainedTokenizerBase | None = None,
        push_to_hub: bool = False,
        **kw: Any,
    ) -> None:
        """Save the model as transformers does, with the guards, the stub and a model card, all or nothing.

        If the process is killed, the directory holds the old checkpoint or the new one. Its other files stay. So does
        an existing README.md.

        Args:
            save_directory: folder of the checkpoint.
            *args: passed to the method of transformers.
            tokenizer: tokenizer to save with the model. Its `model_max_length` is set to the scheme's limit.
            push_to_hub: whether to upload the checkpoint too, as the method `push_to_hub` does.
            **kw: options of `save_pretrained` in transformers, and of `push_to_hub`.

        Raises:
            UnsupportedModelError: if the checkpoint could not be loaded again: layers were added, changed or removed
                since the model was patched; weights were quantised in place; FSDP or ZeRO-3 has spread the parameters
                and `state_dict` is missing; or `state_dict` lacks tensors of the model, or has other ones.
        """
        _check_layers(self)
        directory = Path(save_directory)
        options = {key: kw.pop(key) for key in _PUSH_OPTIONS if key in kw}
        repo_id = kw.pop("repo_id", None) or directory.name
        is_main_process = args[0] if args else kw.get("is_main_process", True)
        # Every process writes its shards of a distributed checkpoint, which serves only to resume.
        if kw.get("distributed_checkpoint") or not is_main_process:
            super().save_pretrained(save_directory, *args, **kw)
            return
        state = args[1] if len(args) > 1 else kw.get("state_dict")
        _check_loadable(self, state, directory)
        with files.staged(directory) as folder:
            kw["save_original_format"] = False  # our classes read the names and shapes that the model has
            super(SavingMixin, stamped(self, state)).save_pretrained(folder, *args, **kw)
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
                write_digests(folder)
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
            self.save_pretrained(folder, tokenizer=tokenizer, max_shard_size=max_shard_size)
            return hub.push(Path(folder), repo_id, **options)


def _check_layers(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError unless all layers are patched and the config has their number."""
    decoder: Any = decoder_of(model)
    layers = on_decoder(decoder).layers
    if (problem := layers.problem(decoder)) is not None:
        raise UnsupportedModelError(problem)
    count = len(decoder.get_submodule(layers.layers))
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
    if state is None and is_spread(model):
        raise UnsupportedModelError(
            "the parameters of this model are spread over processes: on every process call state = "
            "accelerator.get_state_dict(model), then on the main process accelerator.unwrap_model(model)"
            ".save_pretrained(directory, state_dict=state)"
        )
    if any("_orig_mod" in name for name in (dict(model.named_modules()) if state is None else state)):
        raise UnsupportedModelError(
            "torch.compile(module) has wrapped a part of this model and renamed its weights, so no model could load "
            "them: compile in place (module.compile()), or save accelerate's "
            "unwrap_model(model, keep_torch_compile=False)"
        )
    packed = packed_in_place(model) if getattr(model, "hf_quantizer", None) is None else None
    if state is None and packed is not None:
        raise UnsupportedModelError(
            f"this model was quantised in place ({packed} is packed), and its checkpoint could not be loaded: save it "
            "before that, and load it with hf_posenc.from_pretrained(..., quantization_config=...)"
        )
    if state is not None:
        _check_state(model, state, directory)


def _check_state(model: PreTrainedModel, state: dict[str, Tensor], directory: Path) -> None:
    """Raise UnsupportedModelError unless a state dict has exactly the tensors of a model.

    Tied weights may occur under one of their names. An empty state dict is allowed in a folder without weights, because
    transformers' Trainer passes one if DeepSpeed saves the weights.
    """
    if getattr(model, "_hf_peft_config_loaded", False):  # the state dict holds an adapter
        return
    if not state and not any(WEIGHTS.fullmatch(path.name) for path in directory.glob("*.safetensors*")):
        return
    names_of_tensor: dict[int, set[str]] = {}
    for name, tensor in named_tensors(model):
        names_of_tensor.setdefault(id(tensor), set()).add(name)
    ignored = set(model._keys_to_ignore_on_save or ())
    lacking = sorted(min(names) for names in names_of_tensor.values() if not names & (ignored | state.keys()))
    strange = sorted(state.keys() - {name for names in names_of_tensor.values() for name in names})
    if getattr(model, "hf_quantizer", None) is not None:  # quantizers add keys
        strange = []
    problems = [
        f"{verb} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        for verb, names in (("lacks", lacking), ("has", strange))
        if names
    ]
    if problems:
        raise UnsupportedModelError(
            f"this state_dict is not of this {type(model).__name__}, and the checkpoint could not be loaded: it "
            f"{', and '.join(problems)}. Pass model.state_dict() of this model, without a wrapper around the model, or "
            "leave state_dict out"
        )
