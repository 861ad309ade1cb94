"""What a forward pass asks of a device: few small operations in each layer, and never a number back.

Tensors on the device `meta` have no numbers, so that to read one is an error. A GPU takes some 10 microseconds for the
smallest operation, and to read a number waits for all that were asked for.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from families import tiny
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from hf_posenc import patch_model
from hf_posenc.core.positions import Positions, pack
from hf_posenc.engines import flex, selftest
from hf_posenc.engines.near_far import NearFar

LENGTH = 1500


class Operations(TorchDispatchMode):
    """Counts operations that launch a kernel on a GPU."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Count an operation whose result is no view and no dtype."""
        views = ("_unsafe_view", "expand", "detach", "promote_types", "_reshape_alias", "alias")
        self.count += not (func.is_view or func.overloadpacket.__name__ in views)
        return func(*args, **(kwargs or {}))


def mask(queries, keys, patched):
    """The mask of plainly causal attention, as the mask function of this package makes it, or a dense one."""
    index = torch.arange(keys, device="meta")[None]
    if not patched:
        return torch.empty(1, 1, queries, keys, dtype=torch.bool, device="meta")
    return pack(index[:, -queries:], index, aligned=queries == keys, plain=queries == keys)


def operations(scheme, layers, queries, **hyperparameters):
    """The number of operations of a forward pass over a prompt, or of a token after it."""
    model = tiny("llama", num_hidden_layers=layers).bfloat16().to("meta")
    decoder, cache = model.model, DynamicCache(config=model.config)
    ids, places = (torch.empty(1, LENGTH + 1, dtype=torch.long, device="meta") for _ in range(2))

    def run(start, stop, patched):
        given = {"position_ids": places[:, start:stop], "past_key_values": cache}
        decoder(ids[:, start:stop], attention_mask=mask(stop - start, stop, patched), **given)

    with torch.no_grad():
        keeps_numbers = isinstance(scheme, list)  # in the cache; the keys of others are those of the stock model
        if queries == 1 and not keeps_numbers:
            run(0, LENGTH, patched=False)
        if scheme is not None:
            patch_model(model, scheme, seed=0, **hyperparameters)
        if queries == 1 and keeps_numbers:
            run(0, LENGTH, patched=True)
        with Operations() as counted:
            run(*((LENGTH, LENGTH + 1) if queries == 1 else (0, LENGTH)), patched=scheme is not None)
    return counted.count


@pytest.mark.parametrize(
    ("scheme", "prompt", "token"),
    [
        ("alibi", 4, -9),
        ("transformer_xl", 14, -3),
        (["rope", "forgetting"], 30, 10),
        ("t5", None, 7),
        ("kerple", None, 3),
    ],
    ids=str,
)
def test_few_operations_in_each_layer_and_no_number_read(scheme, prompt, token, monkeypatch):
    """Beyond those of the stock model, which repeats keys beside a mask. Tables have kernels of their own for prompts on CUDA, which `meta` does not stand for."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # which knows no `meta`
    # On CUDA one number is read in a forward pass, which says that position ids are those that were counted.
    monkeypatch.setattr(Positions, "follow", lambda self, ids, *, check=True: self)
    for queries, most in ((LENGTH, prompt), (1, token)):
        if most is not None:
            stock, patched = (operations(s, 2, queries) - operations(s, 1, queries) for s in (None, scheme))
            assert patched - stock <= most, (queries, patched - stock)


def kernel(query, key, value, *, return_aux=None, **options):
    """Stands for FlexAttention."""
    output, sums = (query.new_empty(*query.shape[:3], *last) for last in (value.shape[3:], ()))
    return output if return_aux is None else (output, SimpleNamespace(lse=sums.float()))


@pytest.mark.parametrize(("scheme", "options", "most"), [("shaw", {}, 24), ("far_rope", {"near": 500}, 49)])
def test_parts_of_a_prompt_read_no_number(scheme, options, most, monkeypatch):
    """Beyond those of the stock model, in each layer; with a stand-in for FlexAttention, once for each range."""
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())
    monkeypatch.setattr(Positions, "follow", lambda self, ids, *, check=True: self)
    for name, value in (("DEVICE", "meta"), ("SMALLEST_HEAD", 1), ("compiled", lambda: kernel)):
        monkeypatch.setattr(flex, name, value)
    monkeypatch.setattr(selftest, "fault", lambda kind, attend: None)
    seen, attend = [], NearFar.attend
    monkeypatch.setattr(NearFar, "attend", lambda self, call: seen.append(call) or attend(self, call))
    one, two = (operations(scheme, layers, LENGTH, **options) for layers in (1, 2))
    stock = operations(None, 2, LENGTH) - operations(None, 1, LENGTH)
    assert len(seen) == 3
    assert two - one - stock <= most
