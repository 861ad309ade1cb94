"""Digests of saved files, by which accidental changes are noticed before a checkpoint loads as another model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .guards import UNREGISTERED
from .headers import VARIANTS, WEIGHTS, JsonObject, json_object, read_header

DIGESTS = "hf_posenc_digests"
"""Key of a dict in a saved config, from file name to SHA-256, for the config and for the weights' headers and index.

Digests reveal accidents. Whoever changes files on purpose can change the digests too."""


def config_digest(config: JsonObject) -> str:
    """Return the digest of a saved config, without keys that transformers adds or rewrites when it reads a config."""
    saved = {k: v for k, v in config.items() if k not in (DIGESTS, "auto_map") and not k.startswith("_")}
    return _digest(with_floats(saved))


def with_floats(value: object) -> Any:
    """Return a JSON value with floats in place of transformers' `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        return (
            float(value["__float__"]) if set(value) == {"__float__"} else {k: with_floats(v) for k, v in value.items()}
        )
    return [with_floats(item) for item in value] if isinstance(value, (list, tuple)) else value


def _digest(content: object) -> str:
    """Return the SHA-256 of a JSON value. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def weight_digests(directory: Path) -> dict[str, str]:
    """Return digests of the headers and indices of a folder's weight files, without reading the weights.

    Args:
        directory: folder of a checkpoint.

    Returns:
        File name -> digest of the header of a `model*.safetensors` (names, dtypes, shapes and offsets of its tensors),
        or of an index of shards.

    Raises:
        CheckpointError: if a header or an index cannot be read, or an index names anything but weight files.
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
    """Return the digests in a saved config. They are empty if version 0.1 saved it, or somebody removed them."""
    digests = config.get(DIGESTS, {})
    if not isinstance(digests, dict) or not all(isinstance(value, str) for value in digests.values()):
        raise CheckpointError(f"hf_posenc: config.json: {DIGESTS} must map file names to digests, not be {digests!r}")
    return digests


def check_saved_config(config: JsonObject) -> None:
    """Raise CheckpointError if a config was changed after it was saved."""
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
    """Raise CheckpointError if a model's folder also holds an adapter. transformers would load the adapter's base.

    Args:
        folder: the folder to read, as `files.read` passes it.
        directory: the checkpoint's folder, for messages.
    """
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"hf_posenc: {directory} holds a whole model and an adapter, which may name another base: load the model "
            "from a folder of its own, then the adapter with hf_posenc.load_adapter"
        )


def check_saved_weights(config: JsonObject, folder: Path, directory: Path) -> None:
    """Raise CheckpointError unless the weights in a folder are those that were saved with its config.

    Args:
        config: contents of the folder's config.json.
        folder: the folder to read, as `files.read` passes it.
        directory: the checkpoint's folder, for messages.
    """
    saved, actual = _saved_digests(config), weight_digests(folder)
    # Added weight files could be loaded in place of the saved ones. Added variants, such as fp16, could not.
    has_saved_weights = any(WEIGHTS.fullmatch(name) for name in saved)
    checked = {name for name in actual if name in saved or (has_saved_weights and WEIGHTS.fullmatch(name))}
    strange = sorted(name for name in checked if saved.get(name) != actual[name])
    if strange:
        raise CheckpointError(
            f"hf_posenc: {', '.join(strange)} in {directory}: not what was saved with its config.json. If the weights "
            f"were rewritten on purpose, remove {DIGESTS!r} from config.json"
        )
