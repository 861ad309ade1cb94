"""What a model is, down to the identity of every attribute: for tests that something left it exactly as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from families import tokens
from transformers import PreTrainedModel

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
"""Values without an identity of their own: equal is the same."""


def _inside(value: Any) -> Any:
    """What is in a container, shallowly (a model's dicts are the same objects after any edit); the value otherwise."""
    if isinstance(value, Mapping):
        return [(key, _mark(member)) for key, member in value.items()]  # a list: order counts
    if isinstance(value, list | tuple):
        return [_mark(member) for member in value]
    if isinstance(value, set | frozenset):
        return set(map(repr, value))
    return None


def _mark(value: Any) -> Any:
    return value if isinstance(value, PLAIN) else (type(value), id(value))


def _attributes(thing: Any) -> dict[str, Any]:
    """Every attribute of an object by name, with its identity and, for containers, what is in it."""
    return {name: (_mark(value), _inside(value)) for name, value in vars(thing).items()}


@dataclass(frozen=True)
class Snapshot:
    """A model at one moment. Keeps references to everything in it, so that no identity is given out twice.

    Attributes:
        classes: of every module, by name, in order.
        attributes: of every module: names, values, hooks, registered children.
        config: class, attributes, dict and what would be saved.
        values: the state dict, copied.
        logits: (2, T, V) on fixed tokens; empty unless asked for.
        alive: what must not be collected meanwhile.
    """

    classes: dict[str, type]
    attributes: dict[str, dict[str, Any]]
    config: tuple[Any, ...]
    values: dict[str, torch.Tensor]
    logits: torch.Tensor
    alive: Any


def snapshot(model: PreTrainedModel, *, run: bool = True) -> Snapshot:
    """Return what `model` is now.

    Args:
        model: stock or patched.
        run: also keep its logits.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    config = model.config
    generation = model.generation_config.to_dict() if model.can_generate() else None
    saved = copy.deepcopy((config.to_dict(), config.to_diff_dict(), generation))
    return Snapshot(
        classes={name: type(module) for name, module in modules.items()},
        attributes={name: _attributes(module) for name, module in modules.items()},
        config=(type(config), config.model_type, _attributes(config), saved),
        values={key: tensor.detach().clone() for key, tensor in model.state_dict().items()},
        logits=logits(model) if run else torch.empty(0),
        alive=[dict(vars(thing)) for thing in (*modules.values(), config)],
    )


@torch.no_grad()
def logits(model: PreTrainedModel, length: int = 20) -> torch.Tensor:
    """Return logits (2, length, V) on fixed tokens, the first row padded on the left."""
    ids = tokens(2, length)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return model(ids, attention_mask=mask, use_cache=False).logits


def assert_same(after: Snapshot, before: Snapshot) -> None:
    """Fail, naming the first thing that differs, unless the two are equal bit for bit."""
    assert list(after.classes.items()) == list(before.classes.items())
    for name, attributes in before.attributes.items():
        assert after.attributes[name] == attributes, f"attributes of module {name!r}"
        assert list(after.attributes[name]) == list(attributes), f"order of attributes of module {name!r}"
    assert after.config == before.config
    assert list(after.config[2]) == list(before.config[2])
    assert list(after.values) == list(before.values)
    for key, value in before.values.items():
        assert value.dtype == after.values[key].dtype
        assert value.equal(after.values[key]), key
    assert after.logits.equal(before.logits)
