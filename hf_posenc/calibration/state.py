"""The state of a second stage in one file: enough to go on from it exactly, and what it is the state of."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from .. import files
from ..errors import CheckpointError

ENTRY = "hf_posenc_calibration"
"""Key in the file's metadata: JSON with what the state is of, how many steps were made, and which forms were chosen."""

ADAM = ("step", "exp_avg", "exp_avg_sq")
"""What Adam keeps of a parameter."""


@dataclass(frozen=True)
class FirstStage:
    """What the first stage found.

    Attributes:
        before: for the report, by layer; see `LayerFit`.
        closed: as well.
        chosen: as well.
        base_curve: as well.
        parameters: what the second stage moves, as it finds it.
    """

    before: dict[int, Tensor]
    closed: dict[int, Tensor]
    chosen: dict[int, tuple[str, ...]]
    base_curve: dict[int, Tensor]
    parameters: list[Tensor]


class StateFile:
    """A safetensors file with what has moved, Adam's state, the state of the random order, and the first stage.

    It is written whole or not at all, and replaces the one before.

    Attributes:
        step: how many steps of the second stage were made when it was written; 0 if there is no file yet.
        first_stage: what the first stage found; None until that is known.
    """

    def __init__(self, path: Path, of: dict[str, Any], parameters: dict[str, nn.Parameter]) -> None:
        """Look at what is there.

        Args:
            path: of the file, which need not exist.
            of: what it must be the state of, in words, for JSON.
            parameters: what either stage can move, by name.

        Raises:
            CheckpointError: if the file is no such state, or one of something else.
            OSError: if there is no folder for it.
        """
        self.path, self.parameters = path, parameters
        self.of: dict[str, Any] = json.loads(json.dumps(of))
        self.step = 0
        self.first_stage: FirstStage | None = None
        self.tensors: dict[str, Tensor] = {}
        if path.exists():
            self._read()
        elif not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"{path}: there is no folder {path.absolute().parent}")

    def _read(self) -> None:
        try:
            with safe_open(self.path, "pt") as file:
                entry = json.loads((file.metadata() or {})[ENTRY])
                of = entry["of"]
                self.tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(f"{self.path} is not the state of a calibration") from error
        different = [
            f"{name} was {of.get(name)} and is {self.of.get(name)}"
            for name in sorted(of.keys() | self.of.keys())
            if of.get(name) != self.of.get(name)
        ]
        if different:
            raise CheckpointError(f"{self.path} is the state of another calibration: {'; '.join(different)}")
        self.step = entry["step"]
        chosen = {int(index): tuple(names) for index, names in entry["chosen"].items()}

        def by_layer(part: str) -> dict[int, Tensor]:
            return {index: self.tensors[f"{part}.{index}"] for index in chosen}

        parameters = [self.tensors[f"found.{number}"] for number in range(entry["found"])]
        self.first_stage = FirstStage(
            by_layer("before"), by_layer("closed"), chosen, by_layer("base_curve"), parameters
        )

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
        """Put what was read where it belongs; nothing where nothing was."""
        if not self.tensors:
            return
        for name, parameter in self.parameters.items():
            parameter.copy_(self.tensors[f"parameter.{name}"])
            kept = {part: self.tensors[place] for part in ADAM if (place := f"adam.{part}.{name}") in self.tensors}
            if kept:
                optimizer.state[parameter] = {
                    part: value if part == "step" else value.to(parameter.device) for part, value in kept.items()
                }
        generator.set_state(self.tensors["random"])
        self.tensors = {}

    def save(self, step: int, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
        """Write the state after a step, counted from 1; 0 means none was made."""
        assert self.first_stage is not None
        found = self.first_stage
        tensors = {"random": generator.get_state()}
        for part in ("before", "closed", "base_curve"):
            tensors |= {f"{part}.{index}": each for index, each in getattr(found, part).items()}
        tensors |= {f"found.{number}": each for number, each in enumerate(found.parameters)}
        for name, parameter in self.parameters.items():
            tensors[f"parameter.{name}"] = parameter.detach()
            tensors |= {f"adam.{part}.{name}": each for part, each in optimizer.state.get(parameter, {}).items()}
        entry = json.dumps({"of": self.of, "step": step, "chosen": found.chosen, "found": len(found.parameters)})
        with files.replaced(self.path) as partial:
            # Copies: what was left as it was stands in the report twice, and safetensors refuses shared memory.
            save_file({n: each.cpu().contiguous().clone() for n, each in tensors.items()}, partial, {ENTRY: entry})
        self.step = step


def digest_of(model: PreTrainedModel) -> str:
    """Return what tells a model from others: a digest of its config and its parameters."""
    kept = {k: v for k, v in model.config.to_dict().items() if k != "transformers_version" and not k.startswith("_")}
    found = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        found.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        _add(found, parameter)
    return found.hexdigest()[:16]


def digest_of_tokens(tokens: Tensor) -> str:
    """Return what tells windows of tokens from others: their number, their length and a digest."""
    found = hashlib.sha256()
    _add(found, tokens.long())
    return f"{tokens.shape[0]} x {tokens.shape[1]}, {found.hexdigest()[:16]}"


def _add(found: Any, tensor: Tensor) -> None:
    found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
