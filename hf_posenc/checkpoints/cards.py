"""Model cards of checkpoints, as Markdown with a YAML head, with values escaped so that they show as they are."""

from __future__ import annotations

import json
import re

from huggingface_hub import ModelCardData

from ..core.registry import scheme_class
from ..core.version import INSTALL
from ..schemes.base import EVERY_SCHEME
from .files import JsonObject
from .scheme_entry import ENTRY, LOSSES, VERSION_KEY, read_calibration, read_schemes

LIBRARY = "hf_posenc"
"""The `library_name` of our checkpoints on the Hub, and one of their tags."""


def card(config: JsonObject) -> str:
    """Return a model card: metadata, a description of the schemes and their calibration, and how to load the model.

    Args:
        config: contents of the checkpoint's config.json.

    Returns:
        Markdown with a YAML head.
    """
    entry, base = config[ENTRY], config["model_type"].removeprefix("posenc_")
    schemes = read_schemes(entry)
    names = " and ".join(plain(scheme["scheme"]) for scheme in schemes)
    about = ""
    for scheme in schemes:
        sentence = (scheme_class(scheme["scheme"]).__doc__ or "").strip().split("\n")[0]
        about += f"{code(scheme['scheme'])}: {sentence}\n\n{hyperparameter_table(scheme)}\n\n"
    calibrated = "not calibrated"
    if (calibration := read_calibration(entry)) is not None:
        calibrated = f"calibrated to its base {plain(describe_calibration(calibration))}"
    return f"""---
{metadata(entry).to_yaml()}
---

# {plain(base)} with {names} positions

This is not a stock {plain(base)} model: its position encoding was replaced by {names}.

{about}{layers_of_schemes([(scheme["scheme"], scheme.get("layers")) for scheme in schemes])}

The swap was {calibrated}.

{loading_section("FOLDER_OR_HUB_ID")}

Saved by hf_posenc {plain(entry[VERSION_KEY])}.
"""


def metadata(entry: object) -> ModelCardData:
    """Return the metadata of a card: library, task, and tags with the names of the schemes.

    Args:
        entry: entry of a config, of any version.
    """
    tags = [LIBRARY, *(scheme["scheme"] for scheme in read_schemes(entry)), "position-encoding"]
    return ModelCardData(library_name=LIBRARY, pipeline_tag="text-generation", tags=list(dict.fromkeys(tags)))


def hyperparameter_table(values: dict[str, object]) -> str:
    """Return a table of a scheme's hyper-parameters, without `layers`; `window` and `sinks` only where they are set."""
    unset = {key for key in EVERY_SCHEME if values.get(key) is None}
    shown = {key: value for key, value in values.items() if key not in {"scheme", "layers", *unset}}
    if not shown:
        return "It has no hyper-parameters."
    cells = ([code(each).replace("|", "\\|") for each in (key, repr(value))] for key, value in shown.items())
    rows = (f"| {key} | {value} |" for key, value in cells)
    return "\n".join(["| hyper-parameter | value |", "|---|---|", *rows])


def layers_of_schemes(schemes: list[tuple[str, object]]) -> str:
    """Return sentences that say which layers each scheme is for.

    Args:
        schemes: pairs of a scheme's name and its `layers`: indices, a slice or layer type as text, or None for all.
    """
    sentences = []
    for name, layers in schemes:
        listed = ", ".join(map(str, layers)) if isinstance(layers, (list, tuple)) else layers
        sentences.append(f"{code(name)} is for {'every layer' if layers is None else f'layers {code(listed)}'}.")
    if all(layers is not None for _, layers in schemes):
        sentences.append("Layers that are not named keep the positions of the base.")
    return " ".join(sentences)


def describe_calibration(calibration: JsonObject) -> str:
    """Return a calibration in words: how many tokens it read, its stage, and its losses.

    Args:
        calibration: the record, as `read_calibration` returns it.
    """
    losses = {name: f"{loss:.2f}" for name, loss in calibration.get("held_out_loss", {}).items()}
    stages = " -> ".join(losses[name] for name in LOSSES if name in losses and name != "base")
    base = f" (base {losses['base']})" if "base" in losses else ""
    measured = f"; held-out loss {stages} nats per token{base}" if losses else ""
    return f"with {calibration['tokens']:,} tokens, stage {calibration['stage']}{measured}"


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


def plain(value: object) -> str:
    """Return `str(value)` as one line of Markdown, with markup, HTML and the pipes of tables escaped."""
    text = one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])|[\\`*\[\]|~#$!]", lambda match: "\\" + match[0], text)
    # A number with a dot, a dash or the like would begin a list.
    return re.sub(r"^(\d*)([-+.)])(?= |$)", r"\1\\\2", text)


def one_line(value: object) -> str:
    """Return `str(value)` as one line of text, with unprintable characters escaped."""
    return "".join(map(_printable, " ".join(str(value).split())))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def code(value: object) -> str:
    """Return `str(value)` as a code span of Markdown, in one line. In the cell of a table, escape its pipes."""
    text = one_line(value) or " "
    fence = "`" * (_longest_run_of_backticks(text) + 1)
    pad = " " if "`" in (text[0], text[-1]) else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def fenced(text: str) -> str:
    """Return text as a code block of Markdown, with a fence that the text does not contain. Escape the unprintable."""
    text = "\n".join("".join(map(_printable, line)) for line in text.splitlines())
    fence = "`" * max(3, _longest_run_of_backticks(text) + 1)
    return f"{fence}\n{text}\n{fence}"


def _longest_run_of_backticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
