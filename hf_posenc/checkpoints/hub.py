"""Names of checkpoints on the Hugging Face Hub, and the upload of a checkpoint in one commit."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import EntryNotFoundError

from . import files
from .cards import LIBRARY, card, metadata
from .files import JsonObject, json_object
from .scheme_entry import ENTRY

_LOADING_CALL = re.compile(r"""hf_posenc\.from_pretrained\(\s*(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')\s*\)""")
_WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*")
# `push` makes the card itself. The other files are a trainer's state.
_NOT_UPLOADED = tuple("README.md .* optimizer.* scheduler.* scaler.* rng_state* *.pth training_args.bin".split())
_TOKENIZER = ("tokenizer*", "tokenization_*.py", "vocab*", "tekken.json", "*.model", "*.tiktoken")


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


def require_tokenizer(name: str) -> None:
    """Raise FileNotFoundError if a folder holds no tokenizer. transformers' own error names packages to install."""
    folder = Path(name)
    if folder.is_dir() and not any(path for pattern in _TOKENIZER for path in folder.glob(pattern)):
        raise FileNotFoundError(
            f'{name} has no tokenizer: AutoTokenizer.from_pretrained("BASE").save_pretrained("{name}") puts its '
            "base's there"
        )


def push(
    folder: Path,
    repo_id: str,
    *,
    commit_message: str | None = None,
    private: bool | None = None,
    token: bool | str | None = None,
    revision: str | None = None,
    tags: Sequence[str] = (),
    **commit: Any,
) -> CommitInfo:
    """Upload a checkpoint's folder in one commit. Until then the repository keeps its old checkpoint.

    The same commit deletes weight files of the repository that the folder does not have. A card in the repository
    stays, and only its metadata are completed. Otherwise the folder's card is uploaded. Its example loads the
    repository.

    Args:
        folder: a checkpoint saved by a patched model. An interrupted save is completed.
        repo_id: `name` or `organization/name`; made if it does not exist.
        commit_message: title of the commit.
        private: whether a new repository is private; None means the account's default.
        token: access token; None means the stored one.
        revision: branch, made if it does not exist; None means the main branch.
        tags: more tags for the card.
        **commit: options of `HfApi.create_commit`, such as `commit_description` and `create_pr`.

    Returns:
        huggingface_hub's CommitInfo.

    Raises:
        FileNotFoundError: if there is no such folder, or it has no config.json.
        ValueError: if it is not a checkpoint of this package; `CheckpointError` if its config is malformed.
        huggingface_hub.errors.HfHubHTTPError: if the Hub refuses the upload.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: name the one that a patched model was saved in")
    files.complete(folder)
    config = json_object(folder / "config.json")
    if ENTRY not in config:
        raise ValueError(f"{folder} is a stock {config.get('model_type')} checkpoint: push it with its own tools")
    api = HfApi(token=token)
    repo = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if revision is not None and not revision.startswith("refs/pr"):
        api.create_branch(repo, branch=revision, exist_ok=True)
    try:
        text = Path(api.hf_hub_download(repo, "README.md", revision=revision)).read_text(encoding="utf-8")
    except EntryNotFoundError:  # so that of the folder, or a new one; its example loads the repository
        own = folder / "README.md"
        text = own.read_text(encoding="utf-8") if own.is_file() else card(config)
        arguments = json.dumps(repo) + (f", revision={json.dumps(revision)}" if revision else "")
        text = _LOADING_CALL.sub(lambda _: f"hf_posenc.from_pretrained({arguments})", text)
    readme = CommitOperationAdd("README.md", _complete_card(text, config, tags).encode())
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and not _matches(path.name, _NOT_UPLOADED)]
    adds = [CommitOperationAdd(path.name, path) for path in paths]
    stale = set(api.list_repo_files(repo, revision=revision)) - {add.path_in_repo for add in adds}
    deletions = [CommitOperationDelete(name) for name in sorted(stale) if _matches(name, _WEIGHTS)]
    return api.create_commit(
        repo,
        [*adds, readme, *deletions],
        commit_message=commit_message or f"Upload {config['architectures'][0]}",
        revision=revision,
        **commit,
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _complete_card(text: str, config: JsonObject, tags: Sequence[str]) -> str:
    """Return the text of a card with our metadata, and more tags, added to its metadata."""
    model_card = ModelCard(text, ignore_metadata_errors=True)
    assert isinstance(model_card.data, ModelCardData)
    ours = metadata(config[ENTRY])
    model_card.data.library_name = LIBRARY
    model_card.data.pipeline_tag = model_card.data.pipeline_tag or ours.pipeline_tag
    model_card.data.tags = list(dict.fromkeys([*(model_card.data.tags or []), *(ours.tags or []), *tags]))
    return str(model_card)
