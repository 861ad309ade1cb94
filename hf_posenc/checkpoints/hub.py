"""Find checkpoints on the Hugging Face Hub, and upload a checkpoint in one commit."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import (
    CommitInfo,
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
from .cards import LIBRARY, card, metadata
from .headers import JsonObject, json_object
from .markdown import one_line
from .scheme_entry import ENTRY

_LOADING_CALL = re.compile(r"""hf_posenc\.from_pretrained\(\s*(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')\s*\)""")
# An absolute path in a card. It has to begin a word, so that a part of a web address does not match.
_ABSOLUTE_PATH = re.compile(r"""(?<![^\s"'`(\[=,])/[^\s"'`)\],;|<>]+""")
_WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*")
# `push` makes the card itself. The other files are a trainer's state.
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


def checkpoint_name(name: str) -> str:
    """Return a name unchanged if it can be that of a checkpoint.

    Args:
        name: a folder or a Hub id.

    Raises:
        FileNotFoundError: if the name can only mean a folder, and there is no such folder.
    """
    path = Path(name)
    if path.is_file():
        raise FileNotFoundError(f"{name} is a file: name the folder of a checkpoint")
    if not path.is_dir() and (name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1):
        raise FileNotFoundError(f"there is no folder {name} (on the Hub it would be NAME or ORGANIZATION/NAME)")
    return name


def find_checkpoint(name: str, revision: str | None = None) -> str:
    """Return a name unchanged if a checkpoint of that name exists: as a folder, in the Hub cache, or on the Hub.

    The Hub is asked once, for five seconds at most. Loading would try again and again.

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
    except Exception as error:  # any exception of the HTTP library that huggingface_hub uses
        why = one_line(str(error).splitlines()[0] if str(error) else type(error).__name__)
        raise FileNotFoundError(f"there is no folder {name}, and the Hub has not answered: {why}") from None
    return name


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
) -> CommitInfo:
    """Upload a checkpoint's folder in one commit. Until then the repository keeps its old checkpoint.

    The same commit deletes weight files of the repository that the folder does not have. A card in the repository
    stays, and only its metadata are completed. Otherwise the folder's card is uploaded. Its example loads the
    repository.

    Args:
        folder: a checkpoint saved by a patched model; it stays unchanged.
        repo_id: `name` or `organization/name`; made if it does not exist.
        commit_message: title of the commit.
        commit_description: text of the commit message below the title.
        private: whether a new repository is private; None means the account's default.
        token: access token; None means the stored one.
        revision: branch, made if it does not exist; None means the main branch.
        create_pr: whether to open a pull request instead of committing.
        tags: more tags for the card.

    Returns:
        huggingface_hub's CommitInfo.

    Raises:
        FileNotFoundError: if there is no such folder, or it has no config.json.
        ValueError: if it is not a checkpoint of this package; `CheckpointError` if its config is malformed.
        huggingface_hub.errors.HfHubHTTPError: if the Hub refuses the upload.
    """
    _check_folder(folder)

    def upload(view: Path) -> CommitInfo:
        config = _read_config(view, folder)
        api = HfApi(token=token)
        repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        if (text := _read_remote_card(repo, revision, token)) is None:
            text = _folder_card(view, config, repo, revision)
        readme = CommitOperationAdd("README.md", _complete_card(text, config, tags or []).encode())
        adds = [CommitOperationAdd(path.name, path) for path in _uploaded_files(view)]
        stale = _stale_weights(api.list_repo_files(repo, revision=revision), {add.path_in_repo for add in adds})
        return api.create_commit(
            repo,
            [*adds, readme, *map(CommitOperationDelete, stale)],
            commit_message=commit_message or f"Upload {config['architectures'][0]}",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )

    return files.read(folder, upload)


def planned(folder: Path) -> dict[str, int]:
    """Return a dict from file name to size in bytes of the files that `push` would upload, without the card.

    The Hub is not asked.

    Args:
        folder: as for `push`, with the same errors.
    """
    _check_folder(folder)

    def sizes(view: Path) -> dict[str, int]:
        _read_config(view, folder)
        return {path.name: path.stat().st_size for path in _uploaded_files(view)}

    return files.read(folder, sizes)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: name the one that a patched model was saved in")


def _read_config(view: Path, folder: Path) -> JsonObject:
    """Return the config of a patched checkpoint.

    Args:
        view: the folder to read, as `files.read` passes it.
        folder: the checkpoint's folder, for messages.
    """
    if not (view / "config.json").is_file():
        raise FileNotFoundError(f"{folder} is no checkpoint: it has no config.json")
    config = json_object(view / "config.json")
    if ENTRY not in config:
        raise ValueError(f"{folder} is a stock {config.get('model_type')} checkpoint: push it with its own tools")
    return config


def _uploaded_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are uploaded unchanged, so without the card."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not any(fnmatch(path.name, pattern) for pattern in _NOT_UPLOADED)
    ]


def _stale_weights(remote_names: list[str], uploaded: set[str]) -> list[str]:
    """Return the names of weight files of a repository that an upload does not replace."""
    stale = (name for name in remote_names if name not in uploaded)
    return [name for name in stale if any(fnmatch(name, pattern) for pattern in _WEIGHTS)]


def _read_remote_card(repo: str, revision: str | None, token: bool | str | None) -> str | None:
    try:
        return Path(hf_hub_download(repo, "README.md", revision=revision, token=token)).read_text(encoding="utf-8")
    except EntryNotFoundError:
        return None


def _folder_card(folder: Path, config: JsonObject, repo: str, revision: str | None) -> str:
    """Return the card of a folder, or a new one. Its example loads the repository; paths of this machine are cut."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else card(config)
    arguments = json.dumps(repo) + (f", revision={json.dumps(revision)}" if revision else "")
    text = _LOADING_CALL.sub(lambda _: f"hf_posenc.from_pretrained({arguments})", text)
    return _ABSOLUTE_PATH.sub(_without_folders, text)


def _without_folders(match: re.Match[str]) -> str:
    """Return the last component of a path of this machine, and any other match unchanged."""
    path = Path(re.sub(r"\\(.)", r"\1", match[0]))  # without the escapes of Markdown
    return match[0].rpartition("/")[2] if path.is_relative_to(Path.home()) or path.exists() else match[0]


def _complete_card(text: str, config: JsonObject, tags: list[str]) -> str:
    """Return the text of a card with our metadata, and more tags, added to its metadata."""
    model_card = ModelCard(text, ignore_metadata_errors=True)
    assert isinstance(model_card.data, ModelCardData)
    ours = metadata(config[ENTRY])
    model_card.data.library_name = LIBRARY
    model_card.data.pipeline_tag = model_card.data.pipeline_tag or ours.pipeline_tag
    model_card.data.tags = list(dict.fromkeys([*(model_card.data.tags or []), *(ours.tags or []), *tags]))
    return str(model_card)
