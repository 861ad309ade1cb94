"""Digests of what was saved, so that what was changed by accident is noticed before it loads as another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .. import files
from ..errors import CheckpointError
from .guards import UNREGISTERED

DIGESTS = "hf_posenc_digests"
"""Key of a saved config: SHA-256 by file name, of the config itself and of the headers and index of its weights.

What was changed by accident would otherwise load as another model. They stop nobody who changes them too."""


def config_digest(config: dict[str, Any]) -> str:
    """Return the digest of a saved config, without what transformers adds or rewrites when it reads one."""
    kept = {k: v for k, v in config.items() if k not in (DIGESTS, "auto_map") and not k.startswith("_")}
    return files.digest(with_floats(kept))


def with_floats(value: Any) -> Any:
    """Return a JSON value with the floats that JSON lacks; transformers writes `{"__float__": "Infinity"}` for one."""
    if isinstance(value, dict):
        return (
            float(value["__float__"]) if set(value) == {"__float__"} else {k: with_floats(v) for k, v in value.items()}
        )
    return [with_floats(each) for each in value] if isinstance(value, (list, tuple)) else value


def write_digests(folder: Path) -> None:
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


def check_saved_config(config: dict[str, Any]) -> None:
    """Raise CheckpointError unless a config is what was saved."""
    if _digests(config).get("config.json", own := config_digest(config)) != own:
        raise CheckpointError(
            f"hf_posenc: config.json of this {config.get('model_type')} was changed after it was saved. If that was on "
            f"purpose, remove {DIGESTS!r} from it; to change a setting for one run, pass it to from_pretrained"
        )
    if config.get("attn_implementation") != UNREGISTERED:
        raise CheckpointError(
            f"hf_posenc: config.json says attn_implementation={config.get('attn_implementation')!r}, where a patched "
            f"model says {UNREGISTERED!r}: an attention implementation is chosen when a model is loaded"
        )


def check_no_adapter(folder: Path, directory: Path) -> None:
    """Raise CheckpointError if an adapter lies beside a model: transformers would load the base that it names."""
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"hf_posenc: {directory} holds a whole model and an adapter, which may name another base: load the model "
            "from a folder of its own, then the adapter with hf_posenc.load_adapter"
        )


def check_saved_weights(config: dict[str, Any], folder: Path, directory: Path) -> None:
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
