"""State files: an interrupted calibration or search resumes from them with the same result."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoints import files
from ..core.errors import CheckpointError


class StateFile:
    """A file of `torch.save` that is written whole or not at all, and replaces the previous one.

    Attributes:
        path: path of the file, which need not exist; None means that nothing is read or written.
        identity: arguments and digests that identify the calibration or the search.
        content: what the file held when it was read; None if there was no file.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: dict[str, object]) -> None:
        """Read the file if it exists.

        Raises:
            CheckpointError: if the file is no state, or has another identity.
            OSError: if the folder of the file does not exist.
        """
        self.path = None if path is None else Path(path)
        self.identity = {name: str(value) for name, value in identity.items()}
        self.content: dict[str, Any] | None = None
        self.written = time.monotonic()
        if self.path is None:
            return
        if not self.path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {self.path.absolute().parent}")
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
                found, self.content = dict(state["identity"]), dict(state["content"])
            except Exception as error:  # torch raises whatever the bytes lead it to
                raise CheckpointError(f"{path} is not a state to resume from") from error
        names = sorted(found.keys() | self.identity.keys())
        pairs = {name: (found.get(name), self.identity.get(name)) for name in names}
        if different := [f"{name} was {was} and is {now}" for name, (was, now) in pairs.items() if was != now]:
            raise CheckpointError(f"{path} is the state of another run: {'; '.join(different)}")

    def save(self, content: dict[str, Any], *, every: float = 0.0) -> None:
        """Write the file, unless it was opened or written less than `every` seconds ago."""
        if self.path is not None and time.monotonic() - self.written >= every:
            with files.replaced(self.path) as partial, partial.open("wb") as file:
                torch.save({"identity": self.identity, "content": content}, file)
            self.written = time.monotonic()


def digest_of(model: PreTrainedModel) -> str:
    """Return a digest of a model's config and parameters."""
    entries = {k: v for k, v in model.config.to_dict().items() if k != "transformers_version" and not k.startswith("_")}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        _update(digest, parameter)
    return digest.hexdigest()[:16]


def digest_of_tokens(tokens: Tensor) -> str:
    """Return the number of windows, their length and a digest of their tokens."""
    digest = hashlib.sha256()
    _update(digest, tokens.long())
    return f"{tokens.shape[0]} x {tokens.shape[1]}, {digest.hexdigest()[:16]}"


def _update(digest: hashlib._Hash, tensor: Tensor) -> None:
    digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
