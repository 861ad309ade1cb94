"""Calls of attention that engines are compared on, by module and situation."""

from functools import partial

import torch
from rows import named

from hf_posenc.core.attention_call import Call
from hf_posenc.core.positions import Positions, pack, unpack
from hf_posenc.core.registry import scheme_class
from hf_posenc.engines import chunked, clipped, dispatch, rescaled, sdpa, toeplitz
from hf_posenc.schemes.base import Dims

HEAD_DIM = 16
WINDOWS = [17, 1, None, 40, 3, 64, 2, None]
SCALING = HEAD_DIM**-0.5


def never_short(monkeypatch):
    """Send every call to the fastest engine that can carry it, however short it is, and cut it in many pieces."""
    for engine in dispatch.ENGINES:
        monkeypatch.setattr(engine, "floors", {})
    for engine in (clipped, rescaled, toeplitz):
        monkeypatch.setattr(engine, "ROWS", 32)
    monkeypatch.setattr(chunked, "SCORES", 2**12)
    monkeypatch.setattr(sdpa, "WHOLE", 0)
    monkeypatch.setattr(sdpa, "ROWS", 32)


def build(scheme, heads, value_dim=None, **hyperparameters):
    dims = Dims(heads, heads, HEAD_DIM, 32, 2, value_dim=value_dim)
    return randomized(scheme_class(scheme).parse(hyperparameters).build(dims))


def randomized(module):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.rand(p.shape, generator=generator) + 0.1)
    return module


def left_padded(length, padding):
    index = torch.arange(length)[None]
    valid = torch.stack([torch.ones(length, dtype=torch.bool), index[0] >= padding])
    counted = valid.cumsum(-1) - 1
    return unpack(
        pack(index, index, query_positions=counted, key_positions=counted, query_valid=valid, key_valid=valid), length
    ), valid


def packed(lengths):
    index = torch.arange(sum(lengths))[None]
    segment = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    place = torch.cat([torch.arange(n) for n in lengths])[None]
    channel = pack(index, index, query_positions=place, key_positions=place, query_segment=segment, key_segment=segment)
    return unpack(channel, sum(lengths)), None


def windowed(length, window):
    index = torch.arange(length)[None]
    return unpack(pack(index, index, window=window), length), None


def first_kept(positions, shown, window):
    return positions.within(window, 3), shown


def static_cache(queries, filled, size, window=None):
    query_index = torch.arange(filled - queries, filled)[None]
    return unpack(pack(query_index, torch.arange(size)[None], window=window), queries), None


def padded_cache(queries, length):
    positions, _ = left_padded(length, 13)
    return positions.cut(slice(length - queries, length), slice(0, length)), None


def far_apart(queries, length):
    index = torch.arange(length)[None]
    channel = pack(index[:, -queries:], index, query_positions=5 * index[:, -queries:], key_positions=5 * index)
    return unpack(channel, queries)


SITUATIONS = {
    "causal": lambda: (Positions.causal(100), None),
    "one chunk": lambda: (Positions.causal(7), None),
    "chunked prefill": lambda: (Positions.causal(40, 130), None),
    "one query": lambda: (Positions.causal(1, 90), None),
    "left-padded": lambda: left_padded(90, 13),
    "packed": lambda: packed([40, 3, 50]),
    "sliding window": lambda: windowed(100, 9),
    "left-padded, first keys kept": lambda: first_kept(*left_padded(90, 13), 9),
    "one query, first keys kept": lambda: first_kept(Positions.causal(1, 90), None, 30),
    "static cache": lambda: static_cache(20, 70, 128),
    "padded cache": lambda: padded_cache(5, 60),
    "one query, static cache with a window": lambda: static_cache(1, 70, 128, window=30),
    "distances beyond the number of keys": lambda: (far_apart(4, 60), None),
}
MODULES = {
    name: partial(build, scheme, **hyperparameters) for name, (scheme, hyperparameters) in named("modules").items()
}


def hard_alibi(heads, value_dim=None, **hyperparameters):
    """ALiBi with a window for each head, of whatever number."""
    return build("alibi", heads, value_dim, windows=WINDOWS[:heads], **hyperparameters)


MODULES["alibi-hard"] = lambda heads, **sizes: hard_alibi(heads, slopes=[0.0] * heads, **sizes)
MODULES["alibi-windows"] = partial(hard_alibi, trainable=True)
FORMS = {name: type(module(4).form(torch.zeros(1, 4, 1, HEAD_DIM))) for name, module in MODULES.items()}
FORMLESS = tuple(name for name, form in FORMS.items() if form is type(None))


def inputs(positions, heads, groups, dtype, batch=2):
    queries, keys = positions.query_index.shape[-1], positions.key_index.shape[-1]
    generator = torch.Generator().manual_seed(1)
    shapes = ((batch, heads, queries, HEAD_DIM), (batch, heads // groups, keys, HEAD_DIM))
    q, k, v = (torch.randn(shape, generator=generator) for shape in (shapes[0], shapes[1], shapes[1]))
    return [each.to(dtype).requires_grad_() for each in (q, k, v)]


def call_of(module, q, k, v, positions, **options):
    """A call that has reached a scheme's module."""
    return Call(q, k, v, positions, **{"scaling": SCALING, **options}, module=module, form=module.form(q))


def seeded(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def compare(actual, expected, relative):
    for number, (a, e) in enumerate(zip(actual, expected, strict=True)):
        scale = max(1.0, e.abs().max().item())
        assert (a.double() - e.double()).abs().max().item() <= relative * scale, number
