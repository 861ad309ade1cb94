"""The identity of a run: every argument that changes its numbers, and the contents of its text and its base.

It is written into a run's folder when the run begins. A finished run is shown again, and an unfinished one continued,
only if the identity is the same. A number must never stand under arguments that it was not made with.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import AutoConfig

from .corpus import Text
from .models import ModelArguments, revision_of
from .options import Options, UsageError, option
from .results import Results, read_json

# Options that change no number. Every other option does, one that somebody adds tomorrow included.
FREE = (
    *("output", "overwrite", "resume"),  # where it is written
    *("push_to", "private", "keep_weights"),  # what becomes of the weights
    *("save_every", "tracker"),  # what is kept and shown on the way
    *("workers",),  # how fast the text is tokenised
)
# The contents of these are part of the identity, not their names: a file may be moved, and a changed one is noticed.
BY_CONTENT = ("data", "model", "revision", "tokenizer")
# A sweep's lists of runs. Each of its runs says which one it is.
LISTS = ("variants", "schemes", "seeds")
OWN = ("variant", "scheme", "seed")
WEIGHTS = ("config.json", "*.safetensors", "*.bin", "*.index.json")


def of(arguments: Options, text: Text, **more: Any) -> Results:
    """Return the identity of a run, as JSON holds it.

    Args:
        arguments: of the recipe, checked.
        text: that the run reads.
        **more: what else the numbers depend on: `variant` and `seed` of a sweep's run; `scheme` with all its
            hyper-parameters, not only those that were given; what `launched` returns.
    """
    left_out = (*FREE, *BY_CONTENT, *LISTS, "scheme_args")
    identity = {name: value for name, value in asdict(arguments).items() if name not in left_out}
    identity["text"] = text.digest()
    if isinstance(arguments, ModelArguments) and arguments.model is not None:
        identity["base"] = digest_of(arguments.model, **revision_of(arguments))
    return dict(json.loads(json.dumps(identity | more)))


def launched(accelerator: Accelerator) -> Results:
    """Return what accelerate launch decides: the precision, and the number of processes, which share a batch."""
    return {"mixed_precision": accelerator.mixed_precision, "processes": accelerator.num_processes}


def digest_of(model: str, **revision: str) -> str:
    """Return the SHA-256 of a checkpoint's config and weights, or the commit of one on the Hub."""
    if not Path(model).is_dir():
        return str(getattr(AutoConfig.from_pretrained(model, **revision), "_commit_hash", None) or model)
    digest = hashlib.sha256()
    for path in sorted({path for pattern in WEIGHTS for path in Path(model).glob(pattern)}):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def file_of(folder: Path) -> Path | None:
    """Return the file that identifies the run in a folder: its results, its progress while it has none, or None."""
    return next((folder / name for name in ("results.json", "progress.json") if (folder / name).is_file()), None)


def hold(folder: Path, wanted: Results, instead: str) -> None:
    """Raise UsageError, with the differences, if a folder holds a run of another identity.

    Args:
        folder: of the run.
        wanted: an identity, or the part of one that `common` returns: then only that part is compared.
        instead: what the user can do about it.
    """
    if (file := file_of(folder)) is None:
        return
    if (present := read_json(file).get("identity")) is None:
        raise UsageError(f"the run in {folder} does not say what it is of (an older version made it): {instead}")
    if different := differences(common(present) if wanted == common(wanted) else present, wanted):
        raise UsageError(f"the run in {folder} had other arguments: {different}: {instead}")


def differences(earlier: Results, now: Results) -> str:
    """Return what differs between two identities, in words."""
    words = []
    for name in sorted({*earlier, *now}):
        before, after = earlier.get(name), now.get(name)
        if before == after:
            continue
        if name in ("text", "base"):
            words.append(f"another {name}" if before and after else f"{'no' if after else 'a'} {name} before")
        else:
            label = name if name in ("processes", "variant") else option(name)
            words.append(f"{label} was {before}, is {after}")
    return ", ".join(words)


def common(identity: Results) -> Results:
    """Return the part of an identity that the runs of one sweep share."""
    return {name: value for name, value in identity.items() if name not in OWN}
