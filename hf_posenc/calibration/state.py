"""The state file of a second stage. An interrupted calibration resumes from it with the same result."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..checkpoints import files
from ..errors import CheckpointError

ENTRY = "hf_posenc_calibration"
"""Key in the file's metadata. Its JSON holds the calibration's identity, the step, and the first stage's numbers."""

BY_LAYER = ("before", "closed", "base_curve")
"""Fields of `FirstStage` that hold a tensor for each layer."""

ADAM = ("step", "exp_avg", "exp_avg_sq")
"""Names of the tensors that Adam holds for a parameter."""


@dataclass(frozen=True)
class FirstStage:
    """The results of the first stage.

    Attributes:
        before: layer index -> `LayerFit.before`.
        closed: layer index -> `LayerFit.closed`.
        base_curve: layer index -> `LayerFit.base_curve`.
        chosen: layer index -> `LayerFit.chosen`.
        losses: field of `HeldOutLoss` (`base`, `swapped`, `closed_form`) -> held-out loss.
        put_back: name of a first-stage result that the judge rejected -> its held-out loss, see `Calibration.put_back`.
        apart: mean divergences with shared modules and with one module for each layer, see `Calibration.apart`.
        parameters: values, after the first stage, of the parameters that the second stage trains.
    """

    before: dict[int, Tensor]
    closed: dict[int, Tensor]
    base_curve: dict[int, Tensor]
    chosen: dict[int, tuple[str, ...]]
    losses: dict[str, float]
    put_back: dict[str, float] = field(default_factory=dict)
    apart: tuple[float, float] | None = None
    parameters: Sequence[Tensor] = ()


class StateFile:
    """A safetensors file with the changed parameters, Adam's state, the random generator, and the first stage.

    The file is written whole or not at all, and replaces the previous one. Without a path nothing is read or written.
    It has these tensors, where a `NAME` is that of a parameter:

    - `parameter.NAME`, the current value, and `adam.step.NAME` and so on, Adam's state (see `ADAM`).
    - `found.N`, the value that the N-th trained parameter had after the first stage.
    - `before.LAYER`, `closed.LAYER` and `base_curve.LAYER`, results of the first stage by layer index.
    - `random`, the state of the random generator.

    Attributes:
        trial: name in `LOSSES` of the loss that the second stage lowers; None until it begins.
        step: number of steps of this trial when the file was written; 0 if there is no file yet.
        put_back: name of an earlier trial that the judge rejected -> its held-out loss.
        first_stage: results of the first stage; None until it has run.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        identity: Mapping[str, object] = MappingProxyType({}),
        parameters: Mapping[str, nn.Parameter] = MappingProxyType({}),
        trained: Sequence[nn.Parameter] = (),
    ) -> None:
        """Read the file if it exists.

        Args:
            path: path of the file, which need not exist; None means no file.
            identity: arguments and digests that identify the calibration, as JSON values. A file with another identity
                is refused.
            parameters: name -> parameter, for all parameters that either stage can change.
            trained: the parameters that the second stage trains.

        Raises:
            CheckpointError: if the file is not the state of a calibration, or belongs to another calibration. Nothing
                has changed then.
            OSError: if the folder of the file does not exist.
        """
        self.path, self.parameters, self.trained = None if path is None else Path(path), parameters, trained
        self.identity: dict[str, object] = json.loads(json.dumps(dict(identity)))
        self.trial: str | None = None
        self.step = 0
        self.put_back: dict[str, float] = {}
        self.first_stage: FirstStage | None = None
        self.tensors: dict[str, Tensor] = {}
        if self.path is None:
            return
        if self.path.exists():
            self._read(self.path)
        elif not (folder := self.path.absolute().parent).is_dir():
            raise FileNotFoundError(f"{self.path}: there is no folder {folder}")

    def begin(self, trial: str, put_back: dict[str, float]) -> None:
        """Reset the state for a trial, unless it already holds this trial."""
        if trial != self.trial:
            self.trial, self.step, self.put_back, self.tensors = trial, 0, dict(put_back), {}

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                entry = json.loads((file.metadata() or {})[ENTRY])
                identity = entry["of"]
                self.tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not the state of a calibration") from error
        different = [
            f"{name} was {identity.get(name)} and is {self.identity.get(name)}"
            for name in sorted(identity.keys() | self.identity.keys())
            if identity.get(name) != self.identity.get(name)
        ]
        if different:
            raise CheckpointError(f"{path} is the state of another calibration: {'; '.join(different)}")
        try:
            chosen = {int(index): tuple(names) for index, names in entry["chosen"].items()}
            self._check_tensors({index: len(names) for index, names in chosen.items()}, int(entry["found"]))
            self.trial, self.step, self.put_back = str(entry["trial"]), int(entry["step"]), dict(entry["put_back"])
            first = entry["first_stage"]
            before, closed, curve = ({i: self.tensors[f"{part}.{i}"] for i in chosen} for part in BY_LAYER)
            self.first_stage = FirstStage(
                before,
                closed,
                curve,
                chosen,
                dict(first["losses"]),
                dict(first["put_back"]),
                None if first["apart"] is None else (float(first["apart"][0]), float(first["apart"][1])),
                [self.tensors[f"found.{number}"] for number in range(len(self.trained))],
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not the whole state of a calibration: {error}") from error

    def _check_tensors(self, heads: dict[int, int], trained_count: int) -> None:
        """Check names, shapes, dtypes and values of all tensors before anything is changed.

        Args:
            heads: layer index -> number of heads.
            trained_count: number of parameters in the file that the second stage trains.

        Raises:
            ValueError: if a tensor is missing, unexpected or wrong.
        """
        expected: dict[str, Tensor] = {"random": torch.Generator().get_state()}
        expected |= {f"parameter.{name}": each.detach() for name, each in self.parameters.items()}
        expected |= {f"found.{number}": each.detach() for number, each in enumerate(self.trained)}
        if trained_count != len(self.trained):
            raise ValueError(f"it has {trained_count} trained parameters, the model has {len(self.trained)}")
        for index, count in heads.items():
            for part in ("before", "closed"):
                expected[f"{part}.{index}"] = torch.empty(count)
            curve = self.tensors.get(f"base_curve.{index}")
            expected[f"base_curve.{index}"] = torch.empty(count, curve.shape[-1] if curve is not None else 0)
        for name, each in self.parameters.items():
            if any(f"adam.{part}.{name}" in self.tensors for part in ADAM):
                expected |= {
                    f"adam.{part}.{name}": torch.empty(()) if part == "step" else each.detach() for part in ADAM
                }
        if missing := sorted(expected.keys() - self.tensors.keys()):
            raise ValueError(f"{missing[0]} is missing")
        if unknown := sorted(self.tensors.keys() - expected.keys()):
            raise ValueError(f"{unknown[0]} is unexpected")
        for name, expected_tensor in expected.items():
            tensor = self.tensors[name]
            if (tensor.shape, tensor.dtype) != (expected_tensor.shape, expected_tensor.dtype):
                raise ValueError(
                    f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, not {tuple(expected_tensor.shape)} of "
                    f"{expected_tensor.dtype}"
                )
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ValueError(f"{name} holds numbers that are not finite")

    @torch.no_grad()
    def restore(self, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
        """Load the file's values into the parameters, the optimizer and the generator.

        Do nothing if there is no file, or if it holds another trial.
        """
        if not self.tensors:
            return
        for name, parameter in self.parameters.items():
            parameter.copy_(self.tensors[f"parameter.{name}"])
            moments = {part: self.tensors[key] for part in ADAM if (key := f"adam.{part}.{name}") in self.tensors}
            if moments:
                optimizer.state[parameter] = {
                    part: value if part == "step" else value.to(parameter.device) for part, value in moments.items()
                }
        generator.set_state(self.tensors["random"])
        self.tensors = {}

    def save(self, step: int, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
        """Write the state after step `step` of the trial. The first step is 1; 0 means that none was taken yet."""
        if self.path is None:
            return
        assert self.first_stage is not None
        first = self.first_stage
        tensors = {"random": generator.get_state()}
        for part in BY_LAYER:
            tensors |= {f"{part}.{index}": each for index, each in getattr(first, part).items()}
        tensors |= {f"found.{number}": each for number, each in enumerate(first.parameters)}
        for name, parameter in self.parameters.items():
            tensors[f"parameter.{name}"] = parameter.detach()
            tensors |= {f"adam.{part}.{name}": each for part, each in optimizer.state.get(parameter, {}).items()}
        entry = json.dumps(
            {
                "of": self.identity,
                "trial": self.trial,
                "step": step,
                "put_back": self.put_back,
                "chosen": first.chosen,
                "found": len(first.parameters),
                "first_stage": {"losses": first.losses, "put_back": first.put_back, "apart": first.apart},
            }
        )
        with files.replaced(self.path) as partial:
            # Copies, because `before` and `closed` can be one tensor, and safetensors refuses shared memory.
            save_file({n: each.cpu().contiguous().clone() for n, each in tensors.items()}, partial, {ENTRY: entry})
        self.step = step


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
