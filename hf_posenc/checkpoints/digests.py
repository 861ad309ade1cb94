"""Digests of what was saved: an accidental change is noticed before it loads as another model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .guards import UNREGISTERED
from .headers import VARIANTS, WEIGHTS, JsonObject, json_object, read_header

DIGESTS = "hf_posenc_digests"
"""Key of a saved config: SHA-256 by file name, of the config itself and of the headers and index of its weights.

They notice accidents. They stop nobody who changes the digests too."""


def config_digest(config: JsonObject) -> str:
    """Return the digest of a saved config, without what transformers adds or rewrites when it reads one."""
    saved = {k: v for k, v in config.items() if k not in (DIGESTS, "auto_map") and not k.startswith("_")}
    return _digest(with_floats(saved))


def with_floats(value: object) -> Any:
    """Return a JSON value with the floats that JSON lacks; transformers writes `{"__float__": "Infinity"}` for one."""
    if isinstance(value, dict):
        return (
            float(value["__float__"]) if set(value) == {"__float__"} else {k: with_floats(v) for k, v in value.items()}
        )
    return [with_floats(each) for each in value] if isinstance(value, (list, tuple)) else value


def _digest(content: object) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys and its spaces."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def weight_digests(directory: Path) -> dict[str, str]:
    """Return digests that tell whose weights a folder holds, without reading the weights.

    Args:
        directory: of a checkpoint.

    Returns:
        By file name the digest of each header of a `model*.safetensors` (names, dtypes, shapes and places of its
        tensors) and of each index of shards.

    Raises:
        CheckpointError: if a header or an index cannot be read, or an index names a file that is not beside it.
    """
    digests = {}
    for path in sorted(directory.iterdir()):
        if not VARIANTS.fullmatch(path.name) or not path.is_file():
            continue
        if path.name.endswith(".json"):
            index = json_object(path)
            names = index.get("weight_map")
            if not isinstance(names, dict) or not all(
                isinstance(name, str) and VARIANTS.fullmatch(name) for name in names.values()
            ):
                raise CheckpointError(f"hf_posenc: {path} names a file that is no model*.safetensors beside it")
            digests[path.name] = _digest(index)
        else:
            digests[path.name] = _digest(read_header(path))
    return digests


def write_digests(folder: Path) -> None:
    """Write the digests of a folder's files into its config.json."""
    path = folder / "config.json"
    config = json_object(path)
    config[DIGESTS] = {path.name: config_digest(config), **weight_digests(folder)}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _saved_digests(config: JsonObject) -> dict[str, str]:
    """Return the digests in a saved config. There are none if version 0.1 saved it or somebody removed them."""
    digests = config.get(DIGESTS, {})
    if not isinstance(digests, dict) or not all(isinstance(value, str) for value in digests.values()):
        raise CheckpointError(f"hf_posenc: config.json: {DIGESTS} must map file names to digests, not be {digests!r}")
    return digests


def check_saved_config(config: JsonObject) -> None:
    """Raise CheckpointError unless a config is what was saved."""
    if _saved_digests(config).get("config.json", own := config_digest(config)) != own:
        model = f"of this {config['model_type']}" if config.get("model_type") else "without a model_type"
        raise CheckpointError(
            f"hf_posenc: config.json {model} was changed after it was saved. If that was on purpose, remove "
            f"{DIGESTS!r} from it; to change a setting for one run, pass it to from_pretrained"
        )
    if config.get("attn_implementation") != UNREGISTERED:
        raise CheckpointError(
            f"hf_posenc: config.json says attn_implementation={config.get('attn_implementation')!r}, where a patched "
            f"model says {UNREGISTERED!r}: an attention implementation is chosen when a model is loaded"
        )


def check_no_adapter(folder: Path, directory: Path) -> None:
    """Raise CheckpointError if an adapter lies beside a model: transformers would load the base that it names.

    Args:
        folder: to look into.
        directory: its name in messages.
    """
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"hf_posenc: {directory} holds a whole model and an adapter, which may name another base: load the model "
            "from a folder of its own, then the adapter with hf_posenc.load_adapter"
        )


def check_saved_weights(config: JsonObject, folder: Path, directory: Path) -> None:
    """Raise CheckpointError unless the weights in a folder are those that were saved with its config.

    Args:
        config: its config.json.
        folder: to look into.
        directory: its name in messages.
    """
    saved, found = _saved_digests(config), weight_digests(folder)
    # A file that was put beside those that were saved could be loaded in their place; one of a variant could not.
    whole = any(WEIGHTS.fullmatch(name) for name in saved)
    wanted = {name for name in found if name in saved or (whole and WEIGHTS.fullmatch(name))}
    strange = sorted(name for name in wanted if saved.get(name) != found[name])
    if strange:
        raise CheckpointError(
            f"hf_posenc: {', '.join(strange)} in {directory}: not what was saved with its config.json. If the weights "
            f"were rewritten on purpose, remove {DIGESTS!r} from config.json"
        )
