"""Which base an adapter of PEFT was trained on: what it says of it, and whether a model is patched like that."""

from __future__ import annotations

import copy
import inspect
import json
import os
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from peft.utils.constants import CONFIG_NAME
from transformers import PreTrainedModel

from ..errors import CheckpointError
from ..registry import scheme_class
from .entry import ENTRY, named_schemes

WHERE = frozenset(inspect.signature(hf_hub_download).parameters) - {"repo_id", "filename"}
"""Options that say where an adapter is, as huggingface_hub has them."""


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
        ENTRY: dict(model.config.position_encoding),
        **said,
    }
    return config


def check_adapter(model: PreTrainedModel, adapter: str | os.PathLike[str], **where: Any) -> None:
    """Check that an adapter was trained on a base patched like this model.

    Args:
        model: patched or stock.
        adapter: the adapter's directory, or a Hub id.
        **where: `subfolder`, `revision`, `token`, `cache_dir`, ... as huggingface_hub has them.

    Raises:
        CheckpointError: if not, or if the adapter does not say.
        OSError: if there is no such adapter, or it cannot be read.
    """
    require_same_base(model, read_adapter_config(adapter, where), adapter, where)


def require_same_base(
    model: PreTrainedModel, raw: dict[str, Any], adapter: str | os.PathLike[str], source: dict[str, Any]
) -> None:
    """Raise CheckpointError unless an adapter says that its base was patched like a model.

    Args:
        model: patched or stock.
        raw: the adapter's config, as JSON holds it.
        adapter: how to call it in messages.
        source: where it is, for `hf_hub_download`: the config of its base is looked for there.
    """
    here = getattr(model.config, ENTRY, None)
    mapping, name = raw.get("auto_mapping") or {}, raw.get("base_model_name_or_path") or ""
    if not isinstance(mapping, dict) or not isinstance(name, str) or not isinstance(mapping.get(ENTRY, {}), dict):
        raise CheckpointError(
            f"hf_posenc: adapter_config.json of {adapter}: auto_mapping must be an object, and so must its {ENTRY}; "
            "base_model_name_or_path must be text"
        )
    cls = str(mapping.get("base_model_class") or "")
    if ENTRY in mapping:
        trained_on: Any = mapping[ENTRY]
    elif (config := _base_config(name, raw.get("revision"), source)) is not None:
        trained_on = config.get(ENTRY) if str(config.get("model_type")).startswith("posenc_") else None
    elif name and name == model.__dict__.get("name_or_path"):
        return
    elif cls and not cls.startswith("PosEnc"):
        trained_on = None
    else:
        said = f"the base {name!r}, which is not on this machine" if name else "no base"
        said += f", and only that it was a {cls}" if cls else ""
        raise CheckpointError(
            f"hf_posenc: the adapter {adapter} names {said}: it cannot be told whether it was trained on "
            f"{_said(here)}. Adapters name their base if their config has a task_type and they sit inside the model; "
            "for prompts and prefixes hf_posenc.lora.name_base(model, config) writes it. If you know that it fits, "
            "peft.PeftModel.from_pretrained(model, adapter) loads it unchecked"
        )
    if not _same(trained_on, here):
        raise CheckpointError(
            f"hf_posenc: the adapter {adapter} was trained on {_said(trained_on)}, this model has {_said(here)}"
        )


def _said(entry: Any) -> str:
    said = [{key: value for key, value in each.items() if value is not None} for each in named_schemes(entry)]
    return " and ".join(map(str, said)) or "stock positions"


def _same(trained_on: Any, here: Any) -> bool:
    """Return whether two entries, each None for stock positions, name the same schemes with the same values."""
    then, now = named_schemes(trained_on), named_schemes(here)
    if not then or not now:
        return not trained_on and not here
    of_0_1 = "schemes" not in trained_on
    return len(then) == len(now) and all(_same_scheme(*both, of_0_1) for both in zip(then, now, strict=True))


def _same_scheme(then: dict[str, Any], now: dict[str, Any], of_0_1: bool) -> bool:
    then, now = (json.loads(json.dumps(each)) for each in (then, now))
    if then["scheme"] != now["scheme"]:
        return False
    cls = scheme_class(now["scheme"])
    return cls.say_the_same(cls.meant_in_0_1(then) if of_0_1 else then, now)


def _base_config(name: str, revision: Any, source: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config of the base that an adapter names, from a folder or the cache of downloads, or None."""
    if not name:
        return None
    path: str | None = str(Path(name) / "config.json")
    if not os.path.isfile(str(path)):
        try:
            cache, own = source.get("cache_dir"), revision if isinstance(revision, str) else None
            path = hf_hub_download(name, "config.json", revision=own, cache_dir=cache, local_files_only=True)
        except (OSError, ValueError):  # not there, or no name of a repository
            return None
    return _object(Path(str(path)))


def read_adapter_config(adapter: str | os.PathLike[str], source: dict[str, Any]) -> dict[str, Any]:
    """Return what adapter_config.json holds; nothing that it names is imported."""
    path = Path(adapter) / (source.get("subfolder") or "") / CONFIG_NAME
    if not path.is_file():
        if os.path.isdir(adapter):
            raise FileNotFoundError(f"hf_posenc: {path.parent} has no {CONFIG_NAME}")
        path = Path(hf_hub_download(str(adapter), CONFIG_NAME, **source))
    raw = _object(path)
    if raw.get("megatron_config"):
        raise CheckpointError(f"hf_posenc: {path}: megatron_config would have PEFT import the module that it names")
    return raw


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"hf_posenc: {path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"hf_posenc: {path} holds no JSON object")
    return found
