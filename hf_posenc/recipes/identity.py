"""What a run is of: every argument that changes its numbers, and what its text and its base hold.

It is written into a run's folder when the run begins. A finished run is shown again, and an unfinished one gone on
with, only where all of it is the same: a number must never stand under arguments that it was not made with.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import AutoConfig

from .corpus import Text
from .models import revision_of
from .options import UsageError, option
from .results import read_json

# Options that change no number. Every other option does, one that somebody adds tomorrow included.
FREE = (
    *("output", "overwrite", "resume"),  # where it is written
    *("push_to", "private", "keep_weights"),  # what becomes of the weights
    *("save_every", "tracker"),  # what is kept and shown on the way
    *("workers",),  # how fast the text is tokenised
)
# What these name is looked into, so that a file may be moved, and one that was changed is noticed.
BY_CONTENT = ("data", "model", "revision", "tokenizer")
# A sweep's lists of runs; each of its runs says which one it is.
LISTS = ("variants", "schemes", "seeds")
OWN = ("variant", "scheme", "seed")
WEIGHTS = ("config.json", "*.safetensors", "*.bin", "*.index.json")


def of(arguments: Any, text: Text, **more: Any) -> dict[str, Any]:
    """The identity of a run, as JSON holds it.

    Args:
        arguments: of the recipe, checked.
        text: what is read.
        **more: what else the numbers depend on: `variant` and `seed` of a sweep's run; `scheme` with all its
            hyper-parameters instead of those that were given; what `launched` says.
    """
    left_out = (*FREE, *BY_CONTENT, *LISTS, "scheme_args")
    found = {name: value for name, value in asdict(arguments).items() if name not in left_out}
    found["text"] = text.digest()
    if (model := getattr(arguments, "model", None)) is not None:
        found["base"] = digest_of(model, **revision_of(arguments))
    return json.loads(json.dumps(found | more))


def launched(accelerator: Accelerator) -> dict[str, Any]:
    """What accelerate launch decides: the precision, and the number of processes, which share a batch."""
    return {"mixed_precision": accelerator.mixed_precision, "processes": accelerator.num_processes}


def digest_of(model: str, **revision: str) -> str:
    """Of a checkpoint's config and weights; of one on the Hub the commit."""
    if not Path(model).is_dir():
        return str(getattr(AutoConfig.from_pretrained(model, **revision), "_commit_hash", None) or model)
    found = hashlib.sha256()
    for path in sorted({path for pattern in WEIGHTS for path in Path(model).glob(pattern)}):
        with path.open("rb") as file:
            found.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def file_of(folder: Path) -> Path | None:
    """What says which run is in a folder: results of one that has ended, progress of one that has not; None without."""
    return next((folder / name for name in ("results.json", "progress.json") if (folder / name).is_file()), None)


def hold(folder: Path, wanted: dict[str, Any], instead: str) -> None:
    """UsageError, with what differs, unless the run in a folder, if there is one, is of this.

    Args:
        folder: of the run.
        wanted: an identity, or what `common` leaves of one: then only that is compared.
        instead: what the user can do about it.
    """
    if (file := file_of(folder)) is None:
        return
    if (found := read_json(file).get("identity")) is None:
        raise UsageError(f"the run in {folder} does not say what it is of (an older version made it): {instead}")
    if said := differences(common(found) if wanted == common(wanted) else found, wanted):
        raise UsageError(f"the run in {folder} had other arguments: {said}: {instead}")


def differences(earlier: dict[str, Any], now: dict[str, Any]) -> str:
    """What is not the same, in words."""
    said = []
    for name in sorted({*earlier, *now}):
        before, after = earlier.get(name), now.get(name)
        if before == after:
            continue
        if name in ("text", "base"):
            said.append(f"another {name}" if before and after else f"{'no' if after else 'a'} {name} before")
        else:
            label = name if name in ("processes", "variant") else option(name)
            said.append(f"{label} was {before}, is {after}")
    return ", ".join(said)


def common(identity: dict[str, Any]) -> dict[str, Any]:
    """What the runs of one sweep share."""
    return {name: value for name, value in identity.items() if name not in OWN}
