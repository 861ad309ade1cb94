"""Model cards of checkpoints, as Markdown with a YAML head."""

from __future__ import annotations

import json

from huggingface_hub import ModelCardData

from ..registry import scheme_class
from ..schemes.base import EVERY_SCHEME
from ..version import INSTALL
from .headers import JsonObject
from .markdown import code, plain
from .scheme_entry import ENTRY, LOSSES, VERSION_KEY, read_calibration, read_schemes

LIBRARY = "hf_posenc"
"""The `library_name` of our checkpoints on the Hub, and one of their tags."""


def card(config: JsonObject, base_model: str | None = None) -> str:
    """Return a model card: metadata, a description of the schemes and their calibration, and how to load the model.

    Args:
        config: contents of the checkpoint's config.json.
        base_model: Hub id of the stock checkpoint, if it has one.

    Returns:
        Markdown with a YAML head.
    """
    entry, base = config[ENTRY], config["model_type"].removeprefix("posenc_")
    schemes = read_schemes(entry)
    card_metadata = metadata(entry)
    card_metadata.base_model = base_model
    names = " and ".join(plain(scheme["scheme"]) for scheme in schemes)
    spans = " and ".join(code(scheme["scheme"]) for scheme in schemes)
    about = "\n\n".join(_describe_scheme(scheme) for scheme in schemes)
    in_some_layers = " in some layers" if all(scheme.get("layers") is not None for scheme in schemes) else ""
    return f"""---
{card_metadata.to_yaml()}
---

# {plain(base)} with {names} positions

This is not a stock {plain(base)} model: its position encoding was replaced{in_some_layers} by {spans}.

{about}

{layers_of_schemes([(scheme["scheme"], scheme.get("layers")) for scheme in schemes])}

{_calibration_sentence(entry)}

{loading_section("FOLDER_OR_HUB_ID")}

Saved by hf_posenc {plain(entry[VERSION_KEY])}.
"""


def metadata(entry: object) -> ModelCardData:
    """Return the metadata of a card: library, task, and tags with the names of the schemes.

    Args:
        entry: entry of a config, of any version.
    """
    names = [scheme["scheme"] for scheme in read_schemes(entry)]
    return ModelCardData(
        library_name=LIBRARY,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([LIBRARY, *names, "position-encoding"])),
    )


def _describe_scheme(scheme: JsonObject) -> str:
    """Return the first sentence of a scheme's documentation, and a table of its hyper-parameters."""
    about = (scheme_class(scheme["scheme"]).__doc__ or "").strip().split("\n")[0]
    values = {key: value for key, value in scheme.items() if key != "scheme"}
    return f"{code(scheme['scheme'])}: {about}\n\n{hyperparameter_table(values)}"


def hyperparameter_table(values: dict[str, object]) -> str:
    """Return a table of a scheme's hyper-parameters, without `layers`; `window` and `sinks` only where they are set."""
    unset = {key for key in EVERY_SCHEME if values.get(key) is None}
    shown = {key: value for key, value in values.items() if key not in {"layers", *unset}}
    if not shown:
        return "It has no hyper-parameters."
    rows = (f"| {code(key, cell=True)} | {code(repr(value), cell=True)} |" for key, value in shown.items())
    return "\n".join(["| hyper-parameter | value |", "|---|---|", *rows])


def layers_of_schemes(schemes: list[tuple[str, object]]) -> str:
    """Return sentences that say which layers each scheme is for.

    Args:
        schemes: pairs of a scheme's name and its `layers`: indices, a slice or layer type as text, or None for all.
    """
    sentences = []
    for name, layers in schemes:
        if layers is None:
            where = "every layer"
        elif isinstance(layers, (list, tuple)):
            where = f"layer{'s' * (len(layers) > 1)} {', '.join(plain(index) for index in layers)}"
        else:
            where = f"layers {code(layers)}"
        sentences.append(f"{code(name)} is for {where}.")
    if all(layers is not None for _, layers in schemes):
        sentences.append("Layers that are not named keep the positions of the base.")
    return " ".join(sentences)


def describe_calibration(calibration: JsonObject) -> str:
    """Return a calibration in words: how many tokens it read, its stage, and its losses.

    Args:
        calibration: the record, as `read_calibration` returns it.
    """
    return f"with {calibration['tokens']:,} tokens, stage {calibration['stage']}{_describe_losses(calibration)}"


def _describe_losses(calibration: JsonObject) -> str:
    """Return the measured losses of a calibration as the end of a sentence, or an empty string."""
    losses = {name: f"{loss:.2f}" for name, loss in calibration.get("held_out_loss", {}).items()}
    base = losses.pop("base", None)
    if not losses:
        return f"; held-out loss of the base {base} nats per token" if base else ""
    stages = " -> ".join(losses[name] for name in LOSSES if name in losses)
    return f"; held-out loss {stages} nats per token{f' (base {base})' if base else ''}"


def _calibration_sentence(entry: JsonObject) -> str:
    calibration = read_calibration(entry)
    if calibration is None:
        return "The swap was not calibrated."
    return (
        f"The swap was calibrated to its base with {calibration['tokens']:,} tokens, stage "
        f"{code(calibration['stage'])}{plain(_describe_losses(calibration))}."
    )


def loading_section(repository: str) -> str:
    """Return the section of a card that says how to load a checkpoint.

    Args:
        repository: folder or Hub id of the checkpoint, for the example.
    """
    return f"""## Load it

```python
# {INSTALL}
import hf_posenc

model = hf_posenc.from_pretrained({json.dumps(repository)})
```

`AutoModelForCausalLM` loads it too, after `import hf_posenc`. Stock classes refuse it: they would run it with other
positions."""
