"""One row per scheme and option; above a scheme's rows its formula, written out slowly in float64 from the paper.

Nothing here imports hf_posenc: schemes are named by strings, parameters by the names they have in a checkpoint. The
loops run over heads, queries and keys one by one; only the batch is a tensor dimension, so that autograd gives exact
gradients. A new scheme adds its formula and its rows; test_formulas.py wants every hyper-parameter in some row.

    attention(query (B, H, Q, D), key (B, K, L, D), value (B, K, L, D), parameters,
              *, softmax_scale, cap, trained, whole_heads, hidden, **hyper-parameters) -> (B, Q, H, D)
    table(positions, size, parameters, *, match, **hyper-parameters) -> (len(positions), size), added to hidden states

Queries are the last Q of L tokens. All tensors are float64; `parameters` are those of one layer, shared ones included.
`softmax_scale` is the model's own, as a rule 1/sqrt(D); `cap` its soft cap on scores (Gemma 2), applied to what is a
product of vectors, not to a bias; `trained` the length it was made for; `whole_heads` tells that it turns whole heads;
`hidden` (B, L, E) is what enters the attention.
`match` is the root mean square of what an added table replaces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

Vectors = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A scheme with hyper-parameters, and what it must compute.

    Attributes:
        id: name of the row, starts with the scheme.
        scheme: registered name.
        hyperparameters: keyword arguments of `patch_model`.
        attention: slow attention of one layer.
        table: slow table of position vectors; None for schemes that add none.
        num_heads: the only number of heads that the hyper-parameters fit; None means any.
        roundings: how often it rounds to bfloat16: 1 at the end, and 1 for queries and keys that it rotates as the base does.
        bases: families of the base model whose attention the row can be compared on.
    """

    id: str
    scheme: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    attention: Callable[..., Tensor]
    table: Callable[..., Tensor] | None = None
    num_heads: int | None = None
    roundings: int = 1
    bases: tuple[str, ...] = ("gpt2", "llama")

    def __str__(self) -> str:
        return self.id


def case_of(
    scheme: str,
    attention: Callable[..., Tensor],
    name: str,
    num_heads: int | None = None,
    bases: tuple[str, ...] = ("gpt2", "llama"),
    *,
    table: Callable[..., Tensor] | None = None,
    roundings: int = 1,
    **hyperparameters: Any,
) -> Case:
    """Return the case `scheme-name`."""
    sizes: dict[str, Any] = {"table": table, "num_heads": num_heads, "roundings": roundings, "bases": bases}
    return Case(id=f"{scheme}-{name}", scheme=scheme, hyperparameters=hyperparameters, attention=attention, **sizes)


def dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1)


def identity(x: Tensor) -> Tensor:
    return x


def softmax(e: Tensor) -> Tensor:
    p = torch.exp(e - e.detach().amax(-1, keepdim=True))
    return p / p.sum(-1, keepdim=True)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Callable[[int, int, int, Tensor, Tensor], Tensor],
    vector: Callable[[int, int, int, Tensor], Tensor] = lambda h, i, j, v: v,
    weigh: Callable[[int, Callable[[int], Tensor]], Tensor] = lambda h, row: softmax(row(h)),
) -> Tensor:
    """z_i = sum_{j <= i} p_ij v_j, p_ij = exp(e_ij) / sum_{j <= i} exp(e_ij), e_ij = `score`(h, i, j, q_i, k_j).

    Or p_ij = `weigh`(h, row), of the function from a head to its e_ij of all j <= i, (B, i + 1).
    """
    queries, keys = query.shape[2], key.shape[2]
    shared_by = query.shape[1] // key.shape[1]
    rows = []
    for n in range(queries):
        i = keys - queries + n
        for h in range(query.shape[1]):
            v = value[:, h // shared_by]

            def row(h, i=i, n=n):
                k = key[:, h // shared_by]
                return torch.stack([score(h, i, j, query[:, h, n], k[:, j]) for j in range(i + 1)], -1)

            p = weigh(h, row)
            rows.append(sum(p[:, j, None] * vector(h, i, j, v[:, j]) for j in range(i + 1)))
    return torch.stack(rows, 1).unflatten(1, (queries, query.shape[1]))


# --- nope: softmax(q_i . k_j / sqrt(D)), and nothing else


def plain(query, key, value, parameters, *, softmax_scale, cap=identity, weigh=lambda h, row: softmax(row(h)), **_):
    return attend(query, key, value, lambda h, i, j, q, k: cap(dot(q, k) * softmax_scale), weigh=weigh)


# --- sinusoidal: Vaswani et al. 2017, section 3.5; trained frequencies: Su, spaces.ac.cn/archives/8231
# PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)); their root mean square is 1/sqrt(2).


def sinusoidal_table(
    positions,
    size,
    parameters,
    *,
    match,
    base=10000,
    layout="interleaved",
    frequencies=None,
    scale="match",
    **_,
):
    pairs = math.ceil(size / 2)
    rows = []
    for t in positions:
        sines, cosines = [], []
        for u in range(pairs):
            if "frequencies" in parameters:
                w = parameters["frequencies"][u]
            elif frequencies is None:
                w = torch.tensor(1 / base ** (2 * u / size), dtype=torch.float64)
            else:
                w = torch.tensor(frequencies[u], dtype=torch.float64)
            if "log_ratios" in parameters:
                w = w * torch.exp(parameters["log_ratios"][u])
            sines.append(torch.sin(t * w))
            cosines.append(torch.cos(t * w))
        if layout == "interleaved":
            row = [wave for pair in zip(sines, cosines, strict=True) for wave in pair]
        else:
            row = sines + cosines
        rows.append(torch.stack(row[:size]))
    return torch.stack(rows) * (match / math.sqrt(1 / 2) if scale == "match" else scale)


# --- learned: Gehring et al. 2017, section 3.1: e_t = w_t + p_t. Initialisations: INITIAL_TABLES below


def learned_table(positions, size, parameters, **_):
    return torch.stack([parameters["table"][t] for t in positions])


# A base's table of n rows continued to `count`. Su, spaces.ac.cn/archives/7947, rows counted from 1 as there:
# q_{(i-1)n+j} = a u_i + (1-a) u_j, u_i = (p_i - a p_1) / (1-a), a = 0.4.


def hierarchical_rows(native: Tensor, count: int, match: float) -> Tensor:
    a, n = 0.4, native.shape[0]
    p = {i: native[i - 1] for i in range(1, n + 1)}
    u = {i: (p[i] - a * p[1]) / (1 - a) for i in range(1, n + 1)}
    q = {(i - 1) * n + j: a * u[i] + (1 - a) * u[j] for i in range(1, n + 1) for j in range(1, n + 1)}
    return torch.stack([q[r] for r in range(1, count + 1)])


def sinusoidal_rows(native: Tensor, count: int, match: float) -> Tensor:
    return sinusoidal_table(range(count), native.shape[1], {}, match=match)


INITIAL_TABLES = {
    "native": hierarchical_rows,
    "sinusoidal": sinusoidal_rows,
}


# --- rope: Su et al. 2021, equation (15): the pair (x_a, x_b) at position t is turned by t w_u, w_u = theta^(-2u/D)


def turn(x: Tensor, t: int, frequencies: list[float], pairs: list[tuple[int, int]], factor: float) -> Tensor:
    """(x_a + i x_b) exp(i t w), times `factor`; dimensions in no pair stay."""
    dimensions = list(x.unbind(-1))
    for w, (a, b) in zip(frequencies, pairs, strict=True):
        c, s = math.cos(t * w), math.sin(t * w)
        dimensions[a] = factor * (x[..., a] * c - x[..., b] * s)
        dimensions[b] = factor * (x[..., a] * s + x[..., b] * c)
    return torch.stack(dimensions, -1)


def rope_frequencies(size: int, theta: float, length: int, trained: int, scaling: dict[str, Any] | None):
    """Return the frequencies of `size` dimensions, and the factor on cosines and sines, after one of the scalings.

    linear: positions divided by the factor (Chen et al. 2023). dynamic: theta grows with the length (NTK; bloc97,
    emozilla). yarn: Peng et al. 2023, section 3, with the ramp of the authors' code (linear in the index of the pair,
    from the pair that turns beta_fast times within the trained length to that which turns beta_slow times). longrope:
    Ding et al. 2024, one set of factors up to the trained length, another beyond. llama3: Llama 3.1's code, by wavelength.
    """
    kind = "default" if scaling is None else scaling["rope_type"]
    pairs = size // 2
    if kind == "dynamic" and length > trained:
        s = scaling["factor"]
        theta = theta * (s * length / trained - (s - 1)) ** (size / (size - 2))
    w = [theta ** (-2 * u / size) for u in range(pairs)]
    if kind in ("default", "dynamic", "proportional"):
        return w, 1.0
    if kind == "linear":
        return [x / scaling["factor"] for x in w], 1.0
    original = scaling["original_max_position_embeddings"]
    s = scaling["factor"]
    if kind == "longrope":
        factors = scaling["long_factor"] if length > original else scaling["short_factor"]
        return [x / f for x, f in zip(w, factors, strict=True)], math.sqrt(1 + math.log(s) / math.log(original))
    if kind == "yarn":

        def pair_that_turns(times):  # solve original * theta^(-2u/size) = 2 pi times for u
            return size * math.log(original / (2 * math.pi * times)) / (2 * math.log(theta))

        first = max(math.floor(pair_that_turns(scaling["beta_fast"])), 0)
        last = min(math.ceil(pair_that_turns(scaling["beta_slow"])), size - 1)
        ramp = [min(max((u - first) / (last - first), 0), 1) for u in range(pairs)]
        return [x * (1 - r) + x / s * r for x, r in zip(w, ramp, strict=True)], 0.1 * math.log(s) + 1
    assert kind == "llama3"
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    scaled = []
    for x in w:
        wavelength = 2 * math.pi / x
        if wavelength < original / high:
            scaled.append(x)
        elif wavelength > original / low:
            scaled.append(x / s)
        else:
            smooth = (original / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * x / s + smooth * x)
    return scaled, 1.0


def edited_frequencies(w: list[float], size: int, trained: int, edit: Any) -> list[float]:
    """Return the frequencies after an edit.

    soft_clip: the code of Li et al. 2026, arXiv:2602.05258: the last n times a half cosine that falls from 1 to 0. hope:
    Chen et al. 2024, arXiv:2410.21216: waves longer than the training do not turn. abf: Xiong et al. 2023,
    arXiv:2309.16039: theta times a factor. ntk: Peng et al. 2023, arXiv:2309.00071, section 3.1: theta times s^(D/(D-2)).
    """
    if isinstance(edit, tuple):
        return list(edit)
    if edit["name"] == "soft_clip":
        n = edit["pairs"]
        last = [0.5 + 0.5 * math.cos(k * math.pi / (n - 1)) for k in range(n)]
        return [x * y for x, y in zip(w, [1.0] * (len(w) - n) + last, strict=True)]
    if edit["name"] == "hope":
        return [0.0 if 2 * math.pi / x > edit.get("length", trained) else x for x in w]
    s = edit["factor"] if edit["name"] == "abf" else edit["factor"] ** (size / (size - 2))
    return [x / s ** (2 * u / size) for u, x in enumerate(w)]


def rope_attention(
    query,
    key,
    value,
    parameters,
    *,
    softmax_scale,
    cap=identity,
    trained=None,
    whole_heads=False,
    rope_theta=10000.0,
    layout="half",
    partial_rotary_factor=1.0,
    scaling=None,
    frequencies=None,
    hidden=None,
):
    """Where the base turns whole heads, partial rotation leaves out the pairs (u, u + D/2) with large u."""
    head = query.shape[-1]
    # Of p-RoPE the frequencies are those of whole heads, and the pairs that are left out are the last ones of these.
    proportional = scaling is not None and scaling["rope_type"] == "proportional"
    size = head if proportional else int(head * partial_rotary_factor)
    length = key.shape[2]
    edit = frequencies
    frequencies, factor = rope_frequencies(size, rope_theta, length, trained or length, scaling)
    if edit is not None:
        frequencies = edited_frequencies(frequencies, size, trained or length, edit)
    if proportional:
        frequencies = [w if 2 * u < head * partial_rotary_factor else 0.0 for u, w in enumerate(frequencies)]
    apart = head // 2 if whole_heads else size // 2
    pairs = [(2 * u, 2 * u + 1) if layout == "interleaved" else (u, u + apart) for u in range(size // 2)]

    def turned(x, offset):
        return torch.stack([turn(x[:, :, n], offset + n, frequencies, pairs, factor) for n in range(x.shape[2])], 2)

    turned_query = turned(query, length - query.shape[2])
    return plain(turned_query, turned(key, 0), value, parameters, softmax_scale=softmax_scale, cap=cap)


def scaled(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": kind, "factor": 3.0, **parameters}


# Made for a base trained on TRAINED positions with heads of HEAD_DIM dimensions, in TRAINED + 4 tokens.
TRAINED = 16
HEAD_DIM = 8
SCALINGS = {
    "linear": scaled("linear"),
    "dynamic": scaled("dynamic"),
    "yarn": scaled("yarn", beta_fast=2.0, beta_slow=0.05, original_max_position_embeddings=TRAINED),
    "longrope": scaled(
        "longrope",
        short_factor=[1.0, 1.1, 1.2, 1.3],
        long_factor=[1.0, 1.5, 2.5, 4.0],
        original_max_position_embeddings=TRAINED,
    ),
    "llama3": scaled("llama3", low_freq_factor=0.1, high_freq_factor=1.0, original_max_position_embeddings=TRAINED),
}


# --- far_rope: the rotation of rope, by another distance for far keys. ReRoPE and its leaky form: Su, spaces.ac.cn/archives/9708 and
# github.com/bojone/rerope. Self-Extend: Jin et al. 2024, section 3, floor positions and the shift w - w // G. Dual chunk attention: An
# et al. 2024, section 3, M[i][j] of the three cases


def far_position(i, j, kind, near, leak, group, chunk, length):
    """Return the distance that far_rope gives the query i and the key j."""
    if kind == "rerope":
        return i - j if i - j < near else near + leak * (i - j - near)
    if kind == "self_extend":
        return i - j if i - j < near else i // group - j // group + near - near // group
    if i // chunk == j // chunk:
        return i - j
    if i // chunk - j // chunk == 1:
        return min(chunk + i % chunk, length - 1) - j % chunk
    return length - 1 - j % chunk


def far_rope_attention(
    query,
    key,
    value,
    parameters,
    *,
    softmax_scale,
    cap=identity,
    trained=None,
    kind="rerope",
    near=None,
    leak=0.0,
    group=8,
    chunk=None,
    length=None,
    **_,
):
    size = query.shape[-1] // 2 * 2
    pairs = [(u, u + size // 2) for u in range(size // 2)]

    def score(h, i, j, q, k):
        w = [10000.0 ** (-2 * u / size) for u in range(size // 2)]
        d = far_position(i, j, kind, near, leak, group, chunk, length)
        return cap(dot(turn(q, d, w, pairs, 1.0), k) * softmax_scale)

    return attend(query, key, value, score)


# --- rope_by_head: the rotation of rope in the listed pairs of a key-value head; Ji et al. 2025, section 3.1, removes it from the others


def rope_by_head_attention(
    query, key, value, parameters, *, softmax_scale, cap=identity, pairs=None, theta=10000.0, **_
):
    size = query.shape[-1] // 2 * 2
    dimensions = [(u, u + size // 2) for u in range(size // 2)]

    def score(h, i, j, q, k):
        by_head = pairs[0] if pairs and isinstance(pairs[0], list) else [pairs]
        turning = by_head[h * len(by_head) // query.shape[1]]
        w = [theta ** (-2 * u / size) if turning is None or u in turning else 0.0 for u in range(size // 2)]
        return cap(dot(turn(q, i, w, dimensions, 1.0), turn(k, j, w, dimensions, 1.0)) * softmax_scale)

    return attend(query, key, value, score)


# --- transformer_xl: Dai et al. 2019, section 3.3, terms (a) to (d), R_d = [sin(d w) | cos(d w)], w_u = 10000^(-2u/E)
# with E = 2F, or listed


def transformer_xl_attention(
    query, key, value, parameters, *, softmax_scale, cap=identity, frequencies=16, longest=10000, **_
):
    w, u, v = (parameters[name] for name in ("position_projection", "content_bias", "position_bias"))
    size, head = w.shape[1], query.shape[-1]
    listed = [longest ** (-2 * n / size) for n in range(frequencies)] if isinstance(frequencies, int) else frequencies
    projected = {}
    for d in range(key.shape[2]):
        angles = [d * omega for omega in listed]
        r = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
        projected[d] = w @ torch.tensor(r, dtype=torch.float64)

    def score(h, i, j, q, k):
        w_r = projected[i - j][h * head : (h + 1) * head]
        return cap((dot(q, k) + dot(q, w_r) + dot(u[h], k) + dot(v[h], w_r)) * softmax_scale)

    return attend(query, key, value, score)


# --- shaw: Shaw et al. 2018, (3), (4): e_ij = q_i (k_j + a^K_ij) / sqrt(D), z_i = sum_j p_ij (v_j + a^V_ij),
# a_ij = w_clip(j - i, k). Causal: only -k <= clip(j - i, k) <= 0 occurs, and row n of a table is the paper's w_-n


def shaw_attention(
    query, key, value, parameters, *, softmax_scale, cap=identity, max_distance=32, share_heads=True, values=True, **_
):
    def a(name, h, i, j):
        label = max(-max_distance, min(max_distance, j - i))
        table = parameters[name]
        return table[-label] if share_heads else table[h, -label]

    def score(h, i, j, q, k):
        return cap(dot(q, k + a("key_embeddings", h, i, j)) * softmax_scale)

    def vector(h, i, j, v):
        return v + a("value_embeddings", h, i, j) if values else v

    return attend(query, key, value, score, vector)


# --- t5: Raffel et al. 2020, section 2.1: a learned scalar per head and bucket of the distance is added to the logit. Buckets
# as in the authors' code (bidirectional=False): n for n < N/2, else N/2 + floor(log(n / (N/2)) / log(max / (N/2)) * N/2)


def t5_attention(query, key, value, parameters, *, softmax_scale, cap=identity, num_buckets=32, max_distance=128, **_):
    half = num_buckets // 2

    def bucket(n):
        if n < half:
            return n
        return min(
            num_buckets - 1, half + int(math.log(n / half) / math.log(max_distance / half) * (num_buckets - half))
        )

    def score(h, i, j, q, k):
        return cap(dot(q, k) * softmax_scale) + parameters["biases"][bucket(i - j), h]

    return attend(query, key, value, score)


# --- kerple: Chi et al. 2022: -r_1 log(1 + r_2 |m - n|) is added to the logit, r_1, r_2 > 0; what is trained is x, with
# r = log(1 + e^x)


def kerple_attention(query, key, value, parameters, *, softmax_scale, cap=identity, **_):
    r_1, r_2 = (torch.log(1 + torch.exp(parameters[name])) for name in ("raw_scale", "raw_rate"))

    def score(h, i, j, q, k):
        return cap(dot(q, k) * softmax_scale) - r_1[h] * torch.log(1 + r_2[h] * (i - j))

    return attend(query, key, value, score)


# --- alibi: Press et al. 2021, section 3: q_i K^T + m [-(i-1), ..., -2, -1, 0]; the slopes of n heads are the geometric
# sequence that starts at 2^(-8/n) with that same ratio; where n is no power of two, those of the closest smaller power
# of two, then every other one of twice that power (the authors' code)


def paper_slopes(n: int) -> list[float]:
    if n & (n - 1) == 0:
        start = 2 ** (-8 / n)
        return [start * start**h for h in range(n)]
    closest = 1
    while closest * 2 < n:
        closest *= 2
    return paper_slopes(closest) + paper_slopes(2 * closest)[0::2][: n - closest]


# Windows of heads: Jelassi et al. 2024, section 3.1: a masked head attends to its last m tokens.


def alibi_attention(query, key, value, parameters, *, softmax_scale, cap=identity, slopes=None, windows=None, **_):
    m = parameters["slopes"] if "slopes" in parameters else slopes or paper_slopes(query.shape[1])
    unseen = torch.tensor(-math.inf, dtype=query.dtype)

    def score(h, i, j, q, k):
        if windows is not None and windows[h] is not None and i - j >= windows[h]:
            return unseen.expand(len(q))
        return cap(dot(q, k) * softmax_scale) - (m[h] * (i - j) if i > j else 0)

    return attend(query, key, value, score)


# --- qk_norm: x / RMS(x), RMS(x) = sqrt(mean(x_u^2) + eps), of Qwen3 (u in one head) and OLMo 2 (u in all heads); with a
# power of the size, which is 1 there


def qk_norm_attention(
    query, key, value, parameters, *, softmax_scale, over="head", exponent=0.0, gain=1.0, eps=1e-6, trainable=True, **_
):
    def normed(x, power):
        rows = []
        for h in range(x.shape[1]):
            size = x[:, h].square().mean(-1) if over == "head" else x.square().mean((1, 3))
            rows.append(
                x[:, h] * torch.exp(-(power[h] if trainable else exponent) / 2 * torch.log(size + eps))[..., None]
            )
        return torch.stack(rows, 1)

    q, k = normed(query, parameters.get("query_exponent")), normed(key, parameters.get("key_exponent"))
    g = parameters["gain"] if trainable else [gain] * query.shape[1]

    return attend(q, k, value, lambda h, i, j, q, k: g[h] * dot(q, k) * softmax_scale)


# --- da_transformer: Wu et al. 2021, equations (2) to (5): R^(h) = w_h R, f(R; v) = (1 + exp(v)) / (1 + exp(v - R)),
# softmax(ReLU(Q K^T) * f(R) / sqrt(d)) V


def da_attention(query, key, value, parameters, *, softmax_scale, cap=identity, relu=True, **_):
    w, v = parameters["distance_weight"], parameters["saturation"]

    def score(h, i, j, q, k):
        f = (1 + torch.exp(v[h])) / (1 + torch.exp(v[h] - w[h] * (i - j)))
        content = cap(dot(q, k) * softmax_scale)
        return (torch.relu(content) if relu else content) * f

    return attend(query, key, value, score)


# --- cope: Golovneva et al. 2024, (3) to (8): g_ij = sigmoid(q_i k_j), p_ij = sum_{t=j}^i g_it, at most p_max, z_i[p] = q_i e[p],
# z_i[p_ij] = (p_ij - floor(p_ij)) z_i[ceil(p_ij)] + (1 - p_ij + floor(p_ij)) z_i[floor(p_ij)]; every product over sqrt(D), as in
# the authors' code


def cope_attention(query, key, value, parameters, *, softmax_scale, cap=identity, num_positions=64, **_):
    e, shared_by = parameters["position_embeddings"], query.shape[1] // key.shape[1]

    def score(h, i, j, q, k):
        gates = [torch.sigmoid(dot(q, key[:, h // shared_by, t]) * softmax_scale) for t in range(j, i + 1)]
        p = torch.clamp(sum(gates), max=num_positions - 1)
        z_ceil, z_floor = dot(q, e[p.ceil().long()]), dot(q, e[p.floor().long()])
        z = (p - p.floor()) * z_ceil + (1 - p + p.floor()) * z_floor
        return cap((dot(q, k) + z) * softmax_scale)

    return attend(query, key, value, score)


# --- bam: Bianchessi et al. 2025: the log of a generalized Gaussian, -(|d - mu| / alpha)^beta, is added to the logit, as the
# authors' code computes it: -r (|d - c| + 1e-5)^p; what is trained is x, with r and p = log(1 + e^x), and c itself


def bam_attention(query, key, value, parameters, *, softmax_scale, cap=identity, centre=False, **_):
    r = torch.log(1 + torch.exp(parameters["raw_scale"]))
    p = torch.log(1 + torch.exp(parameters["raw_exponent"]))

    def bias(h, n):
        away = (parameters["centre"][h] - n).abs() if centre else torch.tensor(float(n), dtype=r.dtype)
        return -r[h] * torch.exp(p[h] * torch.log(away + 1e-5))

    return attend(query, key, value, lambda h, i, j, q, k: cap(dot(q, k) * softmax_scale) + bias(h, i - j))


# --- fire: Li et al. 2024, equation (5): a network of one hidden layer, on log(c (i - j) + 1) / log(c max(L, i) + 1), is added to
# the logit; c and L are used by their size, as in the listing of the paper's appendix


def fire_attention(query, key, value, parameters, *, softmax_scale, cap=identity, threshold=512.0, **_):
    w, b, out = (parameters[name] for name in ("input_weight", "input_bias", "output_weight"))
    c, length = parameters["rate"][0].abs(), (parameters["reach"][0] * threshold).abs()

    def bias(h, i, j):
        largest = torch.maximum(length, torch.tensor(float(i), dtype=w.dtype))
        x = torch.log(c * (i - j) + 1) / torch.log(c * largest + 1)
        return sum(out[h, u] * max(w[u] * x + b[u], 0 * x) for u in range(len(w)))

    return attend(query, key, value, lambda h, i, j, q, k: cap(dot(q, k) * softmax_scale) + bias(h, i, j))


# --- temperature: q_i is multiplied by a factor of n = i + 1. log_n: Chiang and Cholak 2022 with Qwen's clip, max(1, log_L n);
# llama4: 1 + s log(1 + floor(n / L)); scalable: Nakanishi 2025, equation (3), s log n


def temperature_attention(
    query, key, value, parameters, *, softmax_scale, cap=identity, kind="log_n", strength=None, length=None, **_
):
    default = {"constant": 1.0, "log_n": 1.0, "llama4": 0.1, "scalable": 1 / math.log(length or TRAINED)}[kind]
    length = length or TRAINED

    def factor(h, i):
        s = strength if strength is not None else default
        s = s[h] if isinstance(s, list) else s
        if "strength" in parameters:
            s = parameters["strength"][h % len(parameters["strength"])]
        n = i + 1
        return {
            "constant": lambda: s,
            "log_n": lambda: 1 + s * (math.log(n) / math.log(length) - 1) if n > length else 1,
            "llama4": lambda: 1 + s * math.log(1 + n // length),
            "scalable": lambda: s * math.log(n),
        }[kind]()

    return attend(query, key, value, lambda h, i, j, q, k: cap(factor(h, i) * dot(q, k) * softmax_scale))


# --- forgetting: Lin et al. 2025: the logit gets log of the product of f_t over j < t <= i, where
# f_t = sigmoid(w . x_t + b) and x_t is the hidden state that enters the attention


def forgetting_attention(query, key, value, parameters, *, softmax_scale, hidden, cap=identity, **_):
    w, b = parameters["weight"], parameters["bias"]

    def bias(h, i, j):
        kept = torch.ones(len(hidden), dtype=hidden.dtype)
        for t in range(j + 1, i + 1):
            kept = kept / (1 + torch.exp(-dot(w[h], hidden[:, t]) - b[h]))
        return torch.log(kept)

    return attend(query, key, value, lambda h, i, j, q, k: cap(dot(q, k) * softmax_scale) + bias(h, i, j))


# --- softpick: Zuhri et al. 2025, equation (1): ReLU(e^x - 1) / sum |e^x - 1|, with a trained a in place of 1


def softpick_attention(query, key, value, parameters, **options):
    def weigh(h, row):
        above = torch.exp(row(h)) - parameters["offset"][h]
        return torch.relu(above) / above.abs().sum(-1, keepdim=True)

    return plain(query, key, value, {}, weigh=weigh, **options)


# --- differential: Ye et al. 2024, equation (1): (A_1 - lambda A_2) V, and (3): (1 - lambda_init) RMSNorm over the values of both


def differential_attention(query, key, value, parameters, *, kind="each", **options):
    def weigh(h, row):
        first, other, n = (h - h % 2, h - h % 2 + 1, h // 2) if kind == "pairs" else (h, h + 1 - 2 * (h % 2), h)
        return softmax(row(first)) - parameters["factor"][n] * softmax(row(other))

    heads = plain(query, key, value, {}, weigh=weigh, **options)
    if kind == "each":
        return heads
    normed = []
    for h in range(0, query.shape[1], 2):
        both = torch.cat([heads[:, :, h], heads[:, :, h + 1]], -1)
        both = parameters["scale"][h // 2] * both / torch.sqrt(both.square().mean(-1, keepdim=True) + 1e-5)
        normed += both.chunk(2, -1)
    return torch.stack(normed, 2)


# --- dape: Zheng et al. 2024 (V2): S + conv(lrelu(conv(S))), kernels of 1 x width, over the keys that the query sees


def dape_attention(query, key, value, parameters, **options):
    first, second = parameters["first_weight"], parameters["second_weight"]
    reach = first.shape[-1] // 2

    def convolution(channels, weight):  # (C, B, keys), (O, C, width)
        def at(j):
            near = [o for o in range(-reach, reach + 1) if 0 <= j + o < channels.shape[-1]]
            return sum(torch.einsum("oc,cb->ob", weight[..., o + reach], channels[..., j + o]) for o in near)

        return torch.stack([at(j) for j in range(channels.shape[-1])], -1)

    def weigh(h, row):
        scores = torch.stack([row(each) for each in range(len(second))])
        z = convolution(scores, first) + parameters["first_bias"][:, None, None]
        return softmax(scores[h] + convolution(torch.where(z > 0, z, 0.01 * z), second)[h])

    return plain(query, key, value, {}, weigh=weigh, **options)


# --- gated: Qiu et al. 2025, equation (5): Y * sigmoid(X W), a gate per dimension of a head or per head; times 2 here


def gated_attention(query, key, value, parameters, *, hidden, over="element", **options):
    heads = plain(query, key, value, {}, **options)
    gates = 1 / (1 + torch.exp(-(hidden @ parameters["weight"].T)))
    return heads * 2 * gates.unflatten(-1, (query.shape[1], -1))


# --- inkling: the code of Inkling in transformers: the logit gets (r_i . P)[h, i - j] where i - j < extent, r_i = W x_i


def inkling_attention(query, key, value, parameters, *, softmax_scale, hidden, cap=identity, rank=16, extent=1024, **_):
    r = (hidden @ parameters["weight"].T).unflatten(-1, (query.shape[1], rank))  # (B, T, H, rank)

    def score(h, i, j, q, k):
        bias = dot(r[:, i, h], parameters["profiles"][:, i - j]) if i - j < extent else 0
        return cap(dot(q, k) * softmax_scale + bias)

    return attend(query, key, value, score)


# --- the cases

sinusoidal = partial(case_of, "sinusoidal", plain, table=sinusoidal_table)
learned = partial(case_of, "learned", plain, table=learned_table)
rope = partial(case_of, "rope", rope_attention)
far_rope = partial(case_of, "far_rope", far_rope_attention)
rope_by_head = partial(case_of, "rope_by_head", rope_by_head_attention, roundings=2)
transformer_xl = partial(case_of, "transformer_xl", transformer_xl_attention)
shaw = partial(case_of, "shaw", shaw_attention)
t5 = partial(case_of, "t5", t5_attention)
kerple = partial(case_of, "kerple", kerple_attention)
alibi = partial(case_of, "alibi", alibi_attention)
qk_norm = partial(case_of, "qk_norm", qk_norm_attention)
da_transformer = partial(case_of, "da_transformer", da_attention)
cope = partial(case_of, "cope", cope_attention)
bam = partial(case_of, "bam", bam_attention)
fire = partial(case_of, "fire", fire_attention)
temperature = partial(case_of, "temperature", temperature_attention)
forgetting = partial(case_of, "forgetting", forgetting_attention, bases=("gpt2",))  # as of temperature

softpick = partial(case_of, "softpick", softpick_attention)
differential = partial(case_of, "differential", differential_attention)
dape = partial(case_of, "dape", dape_attention)
inkling = partial(case_of, "inkling", inkling_attention)
gated = partial(case_of, "gated", gated_attention)

CASES: list[Case] = [
    Case(id="nope", scheme="nope", attention=plain),
    sinusoidal("default"),
    sinusoidal("split", layout="split"),
    sinusoidal("base", base=500.0, scale=1.0),
    # for sizes of 15 and 16
    sinusoidal("listed", bases=(), frequencies=[1.0, 0.5, 0.0, 0.125, 3.0, 0.01, 0.002, 0.0001], layout="split"),
    sinusoidal("trained", trainable=True),
    sinusoidal("trained-split", trainable=True, layout="split", scale=0.25),
    sinusoidal("every-layer", placement="every_layer"),
    learned("default", num_positions=96),
    learned("normal", num_positions=96, initialization="normal"),
    learned("every-layer", num_positions=96, placement="every_layer", initialization="normal"),
    learned("table-per-layer", num_positions=96, placement="every_layer", share_layers=False, initialization="normal"),
    rope("default"),
    rope("half", layout="half", rope_theta=100.0),
    rope("interleaved", bases=("gpt2",), layout="interleaved"),
    rope("partial", partial_rotary_factor=0.5),
    rope("partial-interleaved", bases=("gpt2",), partial_rotary_factor=0.25, layout="interleaved", rope_theta=20.0),
    *(rope(f"scaling-{kind}", scaling=parameters, rope_theta=100.0) for kind, parameters in SCALINGS.items()),
    # Barbero et al. 2024, arXiv:2410.06205, section 6: p-RoPE keeps the highest frequencies, those below stand still
    rope("proportional", partial_rotary_factor=0.5, scaling={"rope_type": "proportional"}, rope_theta=100.0),
    rope("frequencies", frequencies=(1.0, 0.3, 0.02, 0.0)),
    rope("frequencies-interleaved", bases=("gpt2",), layout="interleaved", frequencies=(3.1, 0.0, 0.2, 0.1)),
    rope("soft-clip", rope_theta=100.0, frequencies={"name": "soft_clip", "pairs": 3}),
    rope(
        "soft-clip-llama3", rope_theta=100.0, frequencies={"name": "soft_clip", "pairs": 3}, scaling=SCALINGS["llama3"]
    ),
    rope("hope", rope_theta=100.0, frequencies={"name": "hope", "length": 40}),
    rope("abf", rope_theta=100.0, frequencies={"name": "abf", "factor": 50.0}),
    rope("abf-linear", rope_theta=100.0, frequencies={"name": "abf", "factor": 50.0}, scaling=SCALINGS["linear"]),
    rope("ntk", rope_theta=100.0, frequencies={"name": "ntk", "factor": 4.0}),
    rope("ntk-partial", partial_rotary_factor=0.5, rope_theta=100.0, frequencies={"name": "ntk", "factor": 4.0}),
    far_rope("rerope", near=3),
    far_rope("leaky", near=2, leak=0.25),
    far_rope("self-extend", kind="self_extend", near=3, group=2),
    far_rope("dual-chunk", kind="dual_chunk", chunk=3, length=4),
    rope_by_head("default"),
    rope_by_head("fastest", pairs=[0]),
    rope_by_head("by-head", 4, ("llama",), pairs=[[[1], [0, 1]]] * 2),
    transformer_xl("default", longest=10000),
    transformer_xl("few", frequencies=3, longest=50),
    transformer_xl("listed", frequencies=[1.0, 0.3]),
    shaw("default"),
    shaw("clipped", max_distance=3),
    shaw("one-label", max_distance=1),
    shaw("no-distance", max_distance=0),
    shaw("per-head", max_distance=3, share_heads=False),
    shaw("per-head-keys-only", max_distance=2, share_heads=False, values=False),
    shaw("shared-layers", max_distance=3, share_layers=True),
    t5("default"),
    t5("narrow", num_buckets=4, max_distance=6),
    t5("per-layer", num_buckets=6, max_distance=9, share_layers=False),
    kerple("default"),
    kerple("per-layer", share_layers=False),
    bam("default"),
    bam("centre", centre=True),
    bam("shared-layers", share_layers=True),
    fire("far", hidden_size=4),
    fire("near", hidden_size=3, threshold=4.0),
    fire("shared-layers", hidden_size=5, threshold=2.5, share_layers=True),
    temperature("short", length=2),
    temperature("llama4", kind="llama4", length=3, strength=0.8),
    temperature("scalable", kind="scalable"),
    temperature("per-head", 4, kind="constant", strength=[0.2, 0.9, 3.0, 1.4]),
    temperature("one-number", length=2, trainable=True, share_heads=True, share_layers=True),
    forgetting("default"),
    forgetting("low", bias=-1.0),
    alibi("default"),
    alibi("own-slopes", num_heads=4, slopes=(0.9, 0.3, 0.0, 0.01)),
    alibi("trained", trainable=True),
    alibi("trained-own-slopes", num_heads=4, slopes=(0.9, 0.3, 0.0, 0.01), trainable=True),
    alibi("windows", num_heads=4, windows=(None, 4, 1, 6)),
    alibi("hard", num_heads=4, slopes=(0.0, 0.0, 0.0, 0.0), windows=(1, 2, 3, None)),
    alibi("trained-windows", num_heads=4, slopes=(0.2, 0.0, 0.0, 0.3), windows=(2, 1, 7, None), trainable=True),
    qk_norm("default"),
    qk_norm("all-heads", over="all_heads", eps=0.1),
    qk_norm("norm", exponent=1.0, gain=1.7, trainable=False),
    qk_norm("half", over="all_heads", exponent=0.5, gain=3.0, trainable=False),
    softpick("default"),
    softpick("paper", offset=1.0),
    differential("default", 4),
    differential("pairs", 4, kind="pairs", start=0.6),
    dape("default", hidden_size=5),
    dape("mixes-heads", hidden_size=3, width=1),
    gated("default"),
    gated("heads", over="head"),
    inkling("near", rank=3, extent=4),
    da_transformer("default"),
    da_transformer("no-relu", relu=False),
    cope("default"),
    cope("few", num_positions=3),
    cope("shared-layers", num_positions=5, share_layers=True),
]
