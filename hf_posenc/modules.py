"""Modules with position parameters: on an attention, in front of a layer, or in place of what a base had.

They are called through `forward` only: PEFT, FSDP and offloading see nothing else. They have no buffers, since those
would be lost on the meta device, and start through `transformers.initialization`, which leaves loaded values alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .attention_call import Call
from .forms import Content, Form
from .sinusoids import sinusoids


@dataclass(frozen=True)
class Native:
    """The positions that the base model had, for modules that start from them.

    Attributes:
        table: (num_positions, E) the base's own table of positions, or None.
        token_rms: root mean square of the token embeddings as they enter the first layer.
        max_positions: the length the base was configured for; None if its config does not say.
    """

    table: Tensor | None
    token_rms: float
    max_positions: int | None


class PositionModule(nn.Module):
    """A module with position parameters."""

    def reset_parameters(self) -> None:
        """Start the parameters through `transformers.initialization`, which leaves loaded values alone."""


class ScoreModule(PositionModule):
    """Sits on an attention module as `posenc`, and has the formula of the attention scores.

    A scheme whose scores depend on the distance in one of the ways in `hf_posenc.forms` says so in `form`, and gets
    every engine that takes this form. Any other scheme writes out `scores`, and `mix` if it also changes what is
    summed, and runs on the engines that take every formula. Without either, this is attention without positions.
    """

    def forward(
        self, call: Call, attend: Callable[[Call], tuple[Tensor, Tensor | None]]
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            call: what is to be computed.
            attend: computes it.

        Returns:
            output (B, Q, H, D) in the query's dtype, and the weights (B, H, Q, L) if the call wants them.
        """
        return attend(replace(call, module=self, form=self.form(call.query)))

    def form(self, like: Tensor) -> Form | None:
        """Return how the scores depend on distance, or None if that is no form.

        Args:
            like: has the device, and the dtype beside which positions are computed (`compute_dtype`).
        """
        return None

    def scores(self, call: Call) -> Tensor:
        """Return the scores before masking, (B, H, Q, L).

        Args:
            call: widened: float32 or float64, keys repeated to H heads. What a query does not see (`call.visible()`) is
                masked afterwards.
        """
        return call.products()

    def mix(self, call: Call, weights: Tensor) -> Tensor:
        """Return the weighted sum of values, (B, H, Q, D), from weights (B, H, Q, L) of a widened call."""
        return weights @ call.value


class WithoutPositions(ScoreModule):
    """Attention that knows no positions but what each query may see: no scheme is on these scores."""

    def form(self, like: Tensor) -> Content:
        """Return the form that has nothing but the content, see `ScoreModule.form`."""
        return Content()


class PositionEmbedding(PositionModule):
    """Turns positions into vectors that are added to the hidden states.

    `like`, where set, refers to the token embedding: the vectors take the dtype of its weight.
    """

    like: Reference | None = None

    def forward(self, *args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Return one vector per position.

        It may stand in for a base's own table, so it takes the arguments of those. GPT-2 passes the positions first.
        OPT passes a mask first, and `position_ids` by name. Positions of padding (negative in OPT) count as 0;
        the decoder refuses other negative ones.

        Args:
            *args: position ids (B|1, T) first, unless given by name.
            position_ids: (B|1, T).
            **kwargs: ignored.

        Returns:
            (B|1, T, E).
        """
        ids = args[0] if position_ids is None else position_ids
        vectors = self.embed(ids.clamp(min=0))
        return vectors if self.like is None else vectors.to(self.like().weight.dtype)

    def embed(self, position_ids: Tensor) -> Tensor:
        """Return the vectors (B|1, T, E) of positions (B|1, T) >= 0."""
        raise NotImplementedError(type(self).__name__)

    def initialize(self, native: Native) -> None:
        """Start from the base model; afterwards `reset_parameters` has nothing to do."""
        self.reset_parameters()


class Rotation(PositionModule):
    """Makes the cosines and sines by which pairs of dimensions of queries and keys are turned."""

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, each of `[angles | angles]`, as transformers' rotary modules do.

        Args:
            x: has the dtype of the result.
            position_ids: (B|1, T); several coordinates of a position, (N, B, T), are alike.
            *args: of families, ignored.
            **kwargs: of families, ignored.

        Returns:
            (B|1, T, 2 F) each, for F pairs.
        """
        position_ids = position_ids[0] if position_ids.ndim == 3 else position_ids
        sines, cosines = sinusoids(position_ids, self.frequencies(position_ids.device))
        return torch.cat([cosines, cosines], -1).to(x.dtype), torch.cat([sines, sines], -1).to(x.dtype)

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle per token of each turned pair, (F,) in radians, F at most D / 2."""
        raise NotImplementedError(type(self).__name__)


class Reference:
    """Points at a module that is owned elsewhere: the child called `name` of `parent`, looked up at each call.

    It is not registered, so that what it points at is saved and sharded once. It finds what a wrapper (PEFT) has put
    in the child's place. A copy of what holds it points at the same module, unless the parent is copied as well.
    """

    def __init__(self, parent: nn.Module, name: str) -> None:
        """Point at a child.

        Args:
            parent: the module that owns it.
            name: its attribute there.
        """
        self.parent = parent
        self.name = name

    def __call__(self) -> Any:
        """Return the module."""
        return getattr(self.parent, self.name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reference:
        """Point into the copied model where the whole model is being copied."""
        return Reference(memo.get(id(self.parent), self.parent), self.name)


class Shared(nn.Module):
    """Calls a module that is owned elsewhere, so that its parameters stay one object, saved once."""

    def __init__(self, owner: Reference) -> None:
        """Refer to a module without registering it.

        Args:
            owner: what to call.
        """
        super().__init__()
        self.owner = owner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the owner."""
        return self.owner()(*args, **kwargs)


def position_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of schemes in a model, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(model.get_submodule(name.rpartition(".")[0]), PositionModule)
    }


def owner_of(module: Any) -> Any:
    """Return the module that another one calls for it, where layers share one; itself otherwise.

    Args:
        module: of a layer; a wrapper that PEFT put around it hands attributes on.
    """
    owner = getattr(module, "owner", None)
    return owner() if isinstance(owner, Reference) else module


def by_head(numbers: Tensor, distance: Tensor) -> Tensor:
    """Return one number per head (H,) with as many further dimensions as distances have, to compute with them."""
    return numbers.view(-1, *[1] * distance.ndim)


def parameter(*shape: int) -> nn.Parameter:
    """Return an uninitialised parameter of this shape, in torch's default dtype."""
    return nn.Parameter(torch.empty(*shape))
