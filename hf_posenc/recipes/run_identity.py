"""The identity of a run: every argument that changes its results, and digests of its text and its base.

It is written into the run's folder when the run begins. A finished run is shown again, and an unfinished one continued,
only if the identity is the same. A number must never stand under arguments that it was not made with.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator
from transformers import AutoConfig

from .corpus import Text
from .models import ModelArguments, revision_of
from .options import Options, UsageError, option
from .results import Results, read_json

# Options that change no result. All other options, new ones included, are part of the identity.
NOT_PART = (
    *("output", "overwrite", "resume"),  # where it is written
    *("push_to", "private", "keep_weights"),  # what happens to the weights
    *("save_every", "tracker"),  # what is saved and shown during the run
    *("workers",),  # how fast the text is tokenised
)
# Of these the identity contains a digest instead of the name, so that a file can be moved but not changed.
BY_CONTENT = ("data", "model", "revision", "tokenizer")
# Options that list the runs of a sweep. The identity of a run names that run instead.
LISTS = ("variants", "schemes", "seeds")
DIFFERS_IN_SWEEP = ("variant", "scheme", "seed")
CHECKPOINT_FILES = ("config.json", "*.safetensors", "*.bin", "*.index.json")


def of(arguments: Options, text: Text, **more: object) -> Results:
    """Return the identity of a run, ready for JSON.

    Args:
        arguments: checked options of the recipe.
        text: text that the run reads.
        **more: other entries: `scheme` with all its hyper-parameters, the entries that `launched` returns, and in a
            sweep `variant` and `seed`.
    """
    left_out = (*NOT_PART, *BY_CONTENT, *LISTS, "scheme_args")
    identity = {name: value for name, value in asdict(arguments).items() if name not in left_out}
    identity["text"] = text.digest()
    if isinstance(arguments, ModelArguments) and arguments.model is not None:
        identity["base"] = digest_of(arguments.model, **revision_of(arguments))
    return dict(json.loads(json.dumps(identity | more)))


def launched(accelerator: Accelerator) -> Results:
    """Return the settings of `accelerate launch` that change results: precision and number of processes."""
    return {"mixed_precision": accelerator.mixed_precision, "processes": accelerator.num_processes}


def digest_of(model: str, **revision: str) -> str:
    """Return the SHA-256 of a local checkpoint's config and weights, or the commit of a checkpoint on the Hub."""
    if not Path(model).is_dir():
        return str(getattr(AutoConfig.from_pretrained(model, **revision), "_commit_hash", None) or model)
    digest = hashlib.sha256()
    for path in sorted({path for pattern in CHECKPOINT_FILES for path in Path(model).glob(pattern)}):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def file_of(folder: Path) -> Path | None:
    """Return the file with the identity of the run in a folder: results.json, else progress.json, else None."""
    return next((folder / name for name in ("results.json", "progress.json") if (folder / name).is_file()), None)


def require(folder: Path, wanted: Results, advice: str) -> None:
    """Raise UsageError, with the differences, if the run in a folder has another identity.

    Args:
        folder: folder of the run; without a run everything is right.
        wanted: an identity, or only the part that `common` returns, which is then compared alone.
        advice: what the user can do about it, for the message.
    """
    if (file := file_of(folder)) is None:
        return
    if (found := read_json(file).get("identity")) is None:
        raise UsageError(f"the run in {folder} has no identity (an older version made it): {advice}")
    if different := differences(common(found) if wanted == common(wanted) else found, wanted):
        raise UsageError(f"the run in {folder} had other arguments: {different}: {advice}")


def differences(earlier: Results, now: Results) -> str:
    """Describe the differences between two identities."""
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
    return {name: value for name, value in identity.items() if name not in DIFFERS_IN_SWEEP}
