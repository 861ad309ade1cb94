"""What a checkpoint's folder says of itself on the Hugging Face Hub, and how it gets there: in one commit."""

from __future__ import annotations

import json
import math
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelCardData,
    hf_hub_download,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from . import files
from .errors import CheckpointError
from .registry import scheme_class
from .version import INSTALL

LIBRARY = "hf_posenc"
"""`library_name` and tag of our checkpoints on the Hub."""

CALIBRATION = "calibration"
"""Key of the entry that holds what is known of the model's last calibration; absent without one."""

STAGES = ("closed_form", "attention")
"""What `stage` of a calibration can be."""

LOSSES = ("base", "swapped", "closed_form", "calibrated")
"""What `held_out_loss` of a calibration can hold, in nats per token."""

_LOADED = re.compile(r"""hf_posenc\.from_pretrained\(\s*(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')\s*\)""")
# What looks like an absolute path within a card: it begins a word, so that it is no part of an address.
_ABSOLUTE = re.compile(r"""(?<![^\s"'`(\[=,])/[^\s"'`)\],;|<>]+""")
_WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*")
# The card is made anew, the rest is a trainer's state.
_NOT_UPLOADED = (
    "README.md",
    ".*",
    "optimizer.*",
    "scheduler.*",
    "scaler.*",
    "rng_state*",
    "*.pth",
    "training_args.bin",
)


def card(config: dict[str, Any], base_model: str | None = None) -> str:
    """Return a model card: metadata, what the model is, how to load it. It contains nothing that was not measured.

    Args:
        config: the checkpoint's config.json.
        base_model: Hub id of the stock checkpoint, if it has one.

    Returns:
        Markdown with a YAML head.
    """
    named, base = config["position_encoding"]["schemes"], config["model_type"].removeprefix("posenc_")
    head = _metadata([each["scheme"] for each in named])
    head.base_model = base_model
    names = " and ".join(plain(each["scheme"]) for each in named)
    spans = " and ".join(code(each["scheme"]) for each in named)
    about = "\n\n".join(_about(each) for each in named)
    some = all(each.get("layers") is not None for each in named)
    layers = "was replaced in some layers" if some else "was replaced"
    return f"""---
{head.to_yaml()}
---

# {plain(base)} with {names} positions

This is not a stock {plain(base)} model: its position encoding {layers} by {spans}.

{about}

{layers_of_schemes([(each["scheme"], each.get("layers")) for each in named])}

{_calibration(config["position_encoding"])}

{loading("FOLDER_OR_HUB_ID")}

Saved by hf_posenc {plain(config["position_encoding"]["hf_posenc_version"])}.
"""


def _about(scheme: dict[str, Any]) -> str:
    """Return what a scheme is, and a table of its hyper-parameters."""
    about = (scheme_class(scheme["scheme"]).__doc__ or "").strip().split("\n")[0]
    values = {key: value for key, value in scheme.items() if key != "scheme"}
    return f"{code(scheme['scheme'])}: {about}\n\n{hyperparameters(values)}"


def calibration_of(entry: Any) -> dict[str, Any] | None:
    """Return what an entry says of the model's last calibration, or None if it says nothing.

    Args:
        entry: of a config of any version.

    Returns:
        `stage`, one of `STAGES`; `tokens`, how many were read; and, where they were measured, `held_out_loss`, some of
        `LOSSES` in nats per token.

    Raises:
        CheckpointError: if it holds anything else.
    """
    if not isinstance(entry, dict) or CALIBRATION not in entry:
        return None
    found = entry[CALIBRATION]
    if not isinstance(found, dict) or not {"stage", "tokens"} <= set(found) <= {"stage", "tokens", "held_out_loss"}:
        raise _malformed("must hold stage and tokens, and may hold held_out_loss", found)
    if found["stage"] not in STAGES:
        raise _malformed(f"stage must be one of {', '.join(STAGES)}", found["stage"])
    if type(found["tokens"]) is not int or found["tokens"] < 0:
        raise _malformed("tokens must be a whole number, 0 or more", found["tokens"])
    losses = found.get("held_out_loss", {})
    if not isinstance(losses, dict) or not set(losses) <= set(LOSSES):
        raise _malformed(f"held_out_loss can hold {', '.join(LOSSES)}", losses)
    for name, loss in losses.items():
        if type(loss) not in (int, float) or not math.isfinite(loss):
            raise _malformed(f"held_out_loss.{name} must be a finite number", loss)
    return dict(found)


def _malformed(rule: str, found: Any) -> CheckpointError:
    return CheckpointError(f"hf_posenc: config.json: position_encoding.{CALIBRATION}: {rule}, not {found!r:.80}")


def calibration_words(found: dict[str, Any]) -> str:
    """Return in words what `calibration_of` found.

    Args:
        found: what it returned, not None.
    """
    return f"with {found['tokens']:,} tokens, stage {found['stage']}{_losses(found)}"


def _losses(found: dict[str, Any]) -> str:
    """Return the end of a sentence that says the losses of a calibration, as far as they were measured."""
    losses = {name: f"{loss:.2f}" for name, loss in found.get("held_out_loss", {}).items()}
    base = losses.pop("base", None)
    if not losses:
        return f"; held-out loss of the base {base} nats per token" if base else ""
    path = " -> ".join(losses[name] for name in LOSSES if name in losses)
    return f"; held-out loss {path} nats per token{f' (base {base})' if base else ''}"


def _calibration(entry: dict[str, Any]) -> str:
    """Return the sentence that says whether a swap was calibrated."""
    found = calibration_of(entry)
    if found is None:
        return "The swap was not calibrated."
    return (
        f"The swap was calibrated to its base with {found['tokens']:,} tokens, stage {code(found['stage'])}"
        f"{plain(_losses(found))}."
    )


def loading(repository: str) -> str:
    """Return the section of a card that says how to load a checkpoint.

    Args:
        repository: folder or Hub id, what `from_pretrained` is given.
    """
    return f"""## Load it

```python
# {INSTALL}
import hf_posenc

model = hf_posenc.from_pretrained({json.dumps(repository)})
```

`AutoModelForCausalLM` loads it too, after `import hf_posenc`. Stock classes refuse it: they would run it with other
positions."""


def hyperparameters(values: dict[str, Any]) -> str:
    """Return a table of a scheme's hyper-parameters, of every scheme's the window, where there is one."""
    shown = {key: value for key, value in values.items() if key != "layers" and (key != "window" or value is not None)}
    if not shown:
        return "It has no hyper-parameters."
    rows = (f"| {code(key, cell=True)} | {code(repr(value), cell=True)} |" for key, value in shown.items())
    return "\n".join(["| hyper-parameter | value |", "|---|---|", *rows])


def layers_of_schemes(schemes: list[tuple[str, Any]]) -> str:
    """Return which layers each scheme is for, in sentences.

    Args:
        schemes: names, each with its `layers`: indices, a slice or a layer type as text, or None for every one.
    """
    said = []
    for name, layers in schemes:
        if layers is None:
            where = "every layer"
        elif isinstance(layers, (list, tuple)):
            where = f"layer{'s' * (len(layers) > 1)} {', '.join(plain(index) for index in layers)}"
        else:
            where = f"layers {code(layers)}"
        said.append(f"{code(name)} is for {where}.")
    if all(layers is not None for _, layers in schemes):
        said.append("Layers that are not named keep the positions of the base.")
    return " ".join(said)


def plain(value: object) -> str:
    """Return a value as one line of Markdown that shows it as it is: no markup, no HTML, no end of a table's cell.

    Args:
        value: shown as `str` does.
    """
    text = one_line(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])|[\\`*\[\]|~#$!]", lambda found: "\\" + found[0], text)
    # At the beginning of a line these would begin a list.
    return re.sub(r"^(\d*)([-+.)])(?= |$)", r"\1\\\2", text)


def one_line(value: object) -> str:
    """Return a value as `str` does, in one line; what cannot be printed, such as control characters, as escapes."""
    return "".join(map(_printable, " ".join(str(value).split())))


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def code(value: object, *, cell: bool = False) -> str:
    """Return a value as an inline code span of Markdown, in which nothing is markup.

    Args:
        value: shown as `str` does, in one line.
        cell: for a cell of a table, where a pipe would end it.
    """
    text = one_line(value) or " "
    fence = "`" * (_backticks(text) + 1)
    pad = " " if "`" in (text[0], text[-1]) else ""
    span = f"{fence}{pad}{text}{pad}{fence}"
    return span.replace("|", "\\|") if cell else span


def fenced(text: str) -> str:
    """Return lines as a code block of Markdown that nothing in them ends; what cannot be printed as escapes."""
    text = "\n".join("".join(map(_printable, line)) for line in text.splitlines())
    fence = "`" * max(3, _backticks(text) + 1)
    return f"{fence}\n{text}\n{fence}"


def _backticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def checkpoint_name(name: str) -> str:
    """Return a checkpoint's name as it is, if it can be one.

    Args:
        name: a folder or a Hub id.

    Raises:
        FileNotFoundError: if it can only be meant as a folder, and there is none.
    """
    path = Path(name)
    if path.is_file():
        raise FileNotFoundError(f"{name} is a file: name the folder of a checkpoint")
    if not path.is_dir() and (name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1):
        raise FileNotFoundError(f"there is no folder {name} (on the Hub it would be NAME or ORGANIZATION/NAME)")
    return name


def find_checkpoint(name: str, revision: str | None = None) -> str:
    """Return a checkpoint's name once there is one: a folder, or a repository that is in the cache or on the Hub.

    The Hub is asked once, for five seconds at most, where loading would try again and again.

    Args:
        name: a folder or a Hub id.
        revision: branch, tag or commit on the Hub.

    Raises:
        FileNotFoundError: if there is no such folder, and no such repository or no answer.
    """
    if Path(checkpoint_name(name)).is_dir():
        return name
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            HfApi().model_info(name, revision=revision, timeout=5.0)
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError):
        raise FileNotFoundError(f"there is no folder {name}, and the Hub has no such checkpoint for you") from None
    except Exception as error:  # whatever the library raises by which huggingface_hub asks
        why = one_line(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise FileNotFoundError(f"there is no folder {name}, and the Hub has not answered: {why}") from None
    return name


def _metadata(schemes: list[str]) -> ModelCardData:
    return ModelCardData(
        library_name=LIBRARY,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys([LIBRARY, *schemes, "position-encoding"])),
    )


def _schemes_of(entry: Any) -> list[str]:
    """Return the names of the schemes in a config's entry; version 0.1 wrote one, without a list."""
    if not isinstance(entry, dict):
        return []
    return [str(each.get("scheme")) for each in entry.get("schemes", [entry]) if isinstance(each, dict)]


def push(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
) -> Any:
    """Upload a checkpoint's folder in one commit: what was there before is whole until the new one is.

    Weight files of the repository that the folder does not have are deleted in the same commit. A card that is there
    already is kept; only its metadata are completed. In the folder's own card the example loads the repository.

    Args:
        folder: a checkpoint saved by a patched model; it is only read.
        repo_id: `name` or `organization/name`; made if it does not exist.
        commit_message: title of the commit.
        commit_description: its text.
        private: whether a new repository is private; None leaves it to the account's default.
        token: access token; None takes the one that is stored.
        revision: branch, made if it does not exist; None means the main one.
        create_pr: open a pull request instead of committing.
        tags: more tags for the card.

    Returns:
        huggingface_hub's CommitInfo.

    Raises:
        FileNotFoundError: if there is no such folder, or it has no config.json.
        ValueError: if it is not a checkpoint of this package; `CheckpointError` if its config is malformed.
        huggingface_hub.errors.HfHubHTTPError: what the Hub refuses.
    """
    _check_folder(folder)

    def upload(view: Path) -> Any:
        config = _config_of(view, folder)
        return _commit(
            view,
            config,
            repo_id,
            commit_message=commit_message or f"Upload {config['architectures'][0]}",
            commit_description=commit_description,
            private=private,
            token=token,
            revision=revision,
            create_pr=create_pr,
            tags=tags,
        )

    return files.read(folder, upload)


def planned(folder: Path) -> dict[str, int]:
    """Return what `push` would upload of a folder, name by name with its bytes, beside the card; nothing is asked.

    Args:
        folder: as for `push`, with the same errors.
    """
    _check_folder(folder)

    def sizes(view: Path) -> dict[str, int]:
        _config_of(view, folder)
        return {path.name: path.stat().st_size for path in _uploaded(view)}

    return files.read(folder, sizes)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: name the one that a patched model was saved in")


def _uploaded(folder: Path) -> list[Path]:
    """Return the files that go to the Hub as they are; the card does not."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in _NOT_UPLOADED)
    ]


def _config_of(view: Path, folder: Path) -> dict[str, Any]:
    """Return the config of a patched checkpoint."""
    if not (view / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no config.json")
    config = files.json_object(view / "config.json")
    if "position_encoding" not in config:
        raise ValueError(f"{folder} is a stock {config.get('model_type')} checkpoint: push it with its own tools")
    return config


def _commit(
    folder: Path,
    config: dict[str, Any],
    repo_id: str,
    *,
    commit_message: str,
    commit_description: str | None,
    private: bool | None,
    token: bool | str | None,
    revision: str | None,
    create_pr: bool,
    tags: list[str] | None,
) -> Any:
    """Upload what lies in a folder that nobody changes meanwhile; the arguments are those of `push`."""
    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo, branch=revision, exist_ok=True)
    text = _remote_card(repo, revision, token)
    if text is None:
        own = folder / "README.md"
        text = own.read_text(encoding="utf-8") if own.is_file() else card(config)
        # The example loads what it is a card of, and shows nobody a folder of this machine.
        arguments = json.dumps(repo) + (f", revision={json.dumps(revision)}" if revision else "")
        text = _LOADED.sub(lambda _: f"hf_posenc.from_pretrained({arguments})", text)
        text = _ABSOLUTE.sub(_without_folders, text)
    content = ModelCard(text, ignore_metadata_errors=True)
    assert isinstance(content.data, ModelCardData)
    ours = _metadata(_schemes_of(config["position_encoding"]))
    content.data.library_name = LIBRARY
    content.data.pipeline_tag = content.data.pipeline_tag or ours.pipeline_tag
    content.data.tags = list(dict.fromkeys([*(content.data.tags or []), *(ours.tags or []), *(tags or [])]))
    adds: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(path.name, path) for path in _uploaded(folder)
    ]
    names = {operation.path_in_repo for operation in adds}
    stale = [
        CommitOperationDelete(name)
        for name in api.list_repo_files(repo, revision=revision)
        if name not in names and any(fnmatch(name, pattern) for pattern in _WEIGHTS)
    ]
    return api.create_commit(
        repo,
        [*adds, CommitOperationAdd("README.md", str(content).encode()), *stale],
        commit_message=commit_message,
        commit_description=commit_description,
        revision=revision,
        create_pr=create_pr,
    )


def _without_folders(found: re.Match[str]) -> str:
    """Return the last name of a path of this machine; anything else that looks like a path as it is."""
    path = Path(re.sub(r"\\(.)", r"\1", found[0]))  # without the escapes of Markdown
    return found[0].rpartition("/")[2] if path.is_relative_to(Path.home()) or path.exists() else found[0]


def _remote_card(repo: str, revision: str | None, token: bool | str | None) -> str | None:
    try:
        return Path(hf_hub_download(repo, "README.md", revision=revision, token=token)).read_text(encoding="utf-8")
    except EntryNotFoundError:
        return None
