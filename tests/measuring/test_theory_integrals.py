"""Sums of waves and their integrals: against quadrature of another kind, closed forms and loops over a model's pairs."""

import cmath
import math

import pytest
import torch
from families import tiny, tokens
from torch.testing import assert_close

from hf_posenc import patch_model
from hf_posenc.analysis import decay
from hf_posenc.dims import Dims
from hf_posenc.theory import (
    expansion,
    power_asymptote,
    power_integral,
    rotary_weights,
    sinusoidal_integral,
    wave_decay,
    wave_integral,
)
from hf_posenc.theory.integrals import cosine_integral, wave_sum

WIDE = torch.arange(-128, 129)
"""The distances that Su 2021 plots."""


def simpson(function, low, high, panels):
    x = torch.linspace(low, high, 2 * panels + 1, dtype=torch.float64)
    y = function(x)
    return ((y[0] + y[-1] + 4 * y[1::2].sum() + 2 * y[2:-1:2].sum()) * (high - low) / (6 * panels)).item()


@pytest.mark.parametrize("x", [0.01, 1.0, 3.999, 4.0, 10.0, 100.0])
def test_cosine_integral_is_its_definition(x):
    inner = simpson(lambda t: torch.where(t > 0, (t.cos() - 1) / t.clamp(min=1e-300), 0.0), 0.0, x, 20000)
    assert cosine_integral(torch.tensor([x])).item() == pytest.approx(
        0.5772156649015329 + math.log(torch.tensor(x).item()) + inner, abs=1e-7 if x in (0.01, 3.999) else 1e-12
    )


def test_sum_of_many_sinusoids_is_the_integral():
    d = torch.tensor([0, 1, 5, 50, 500])
    closed = sinusoidal_integral(d, base=1000.0)
    by_quadrature = [simpson(lambda s, d=d: torch.cos(d * 1000.0**-s), 0.0, 1.0, 40000) for d in d.tolist()]
    assert_close(closed, torch.tensor(by_quadrature, dtype=torch.float64), rtol=0, atol=1e-10)
    many = Dims(num_heads=1, num_key_value_heads=1, head_dim=8, hidden_size=20000, num_layers=1)
    finite = decay("sinusoidal", [0, 5, 50], dims=many, base=1000.0).scores[0, 0]
    assert_close(finite, closed[[0, 2, 3]], rtol=0, atol=1e-3)  # the sum is a left Riemann sum of 10,000 steps
    logarithmic = 1 - (0.5772156649015329 + math.log(500)) / math.log(1e8)
    assert sinusoidal_integral(torch.tensor([500]), base=1e8).item() == pytest.approx(logarithmic, abs=2e-4)


@pytest.mark.parametrize("alpha", [0.5, 2.0, 3.0])
def test_power_integral(alpha):
    d = torch.tensor([0, 1, 7, 60])
    # Simpson in s = r^4: alpha = 0.5 is smooth there.
    expected = [simpson(lambda r, d=d: torch.cos(d * r ** (4 * alpha)) * 4 * r**3, 0.0, 1.0, 50000) for d in d.tolist()]
    assert_close(power_integral(d, alpha=alpha), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-10)
    if alpha > 1:
        far = torch.tensor([4000])
        assert abs(power_integral(far, alpha=alpha) - power_asymptote(far, alpha=alpha)) < 2 / (4000 * alpha)


def test_both_directions_as_su_plots_them():
    """Simpson with 8000 panels over the logarithm, where the waves are smooth."""
    s = torch.linspace(0, 1, 16001, dtype=torch.float64)
    rule = torch.full((16001,), 2.0, dtype=torch.float64)
    rule[1::2], rule[[0, -1]] = 4.0, 1.0
    for base in (1000.0, 10000.0):
        waves = torch.polar(torch.ones(257, 16001, dtype=torch.float64), WIDE[:, None] * base**-s)
        expected = waves @ rule.to(waves.dtype) / 48000
        assert_close(wave_integral(WIDE, base), expected, rtol=0, atol=1e-9)
        assert_close(sinusoidal_integral(WIDE, base=base), expected.real, rtol=0, atol=1e-9)
    assert sinusoidal_integral(torch.tensor([-10.0])).item() == pytest.approx(0.682, abs=5e-4)


def test_bases_about_1():
    d = torch.tensor([-3.0, 0.0, 2.0])
    assert_close(sinusoidal_integral(d, base=1), d.double().cos())
    for base in (0.5, 1.0000001, 1.09, 1.11):
        expected = [simpson(lambda s, x=x, b=base: torch.cos(x * b**-s), 0.0, 1.0, 1000) for x in d.tolist()]
        assert_close(sinusoidal_integral(d, base=base), torch.tensor(expected).double(), rtol=0, atol=1e-7)
    for wrong in (0.0, -2.0, math.inf, math.nan, 1j):
        with pytest.raises(ValueError, match="base of the frequencies must be positive"):
            sinusoidal_integral(d, base=wrong)
        with pytest.raises(ValueError, match="base of the frequencies must be positive"):
            wave_integral(d, wrong)


def test_closed_forms_of_linear_frequencies():
    d = WIDE.double()
    found = wave_integral(WIDE, lambda t: t)
    expected = [cmath.exp(0.5j * x) * math.sin(x / 2) / (x / 2) if x else 1.0 for x in d.tolist()]
    assert_close(found, torch.tensor(expected, dtype=torch.complex128), rtol=0, atol=1e-12)
    # integral t e^(idt) dt = (e^(id) (1 - id) - 1) / d^2
    found = wave_integral(WIDE, lambda t: t, lambda t: t)
    expected = [(cmath.exp(1j * x) * (1 - 1j * x) - 1) / x**2 if x else 0.5 for x in d.tolist()]
    assert_close(found, torch.tensor(expected, dtype=torch.complex128), rtol=0, atol=1e-12)
    # A constant weight is a factor; a complex one turns.
    assert_close(wave_integral(WIDE, 100.0, 2j), 2j * wave_integral(WIDE, 100.0), rtol=0, atol=1e-11)


def test_listed_values_are_joined_by_lines():
    frequencies, weights = [1.0, 0.2, 0.1], [2.0, -1.0 + 1j, 0.5]

    def line(values, t):
        place = min(max(3 * t - 0.5, 0.0), 2.0)
        low = min(int(place), 1)
        return values[low] + (place - low) * (values[low + 1] - values[low])

    count = 6 * 500  # corners stand at multiples of 1/6, where Simpson's panels begin
    expected = []
    for d in (-40, 0, 7):
        y = [line(weights, k / count) * cmath.exp(1j * d * line(frequencies, k / count)) for k in range(count + 1)]
        expected.append((y[0] + y[-1] + 4 * sum(y[1::2]) + 2 * sum(y[2:-1:2])) / (3 * count))
    found = wave_integral(torch.tensor([-40, 0, 7]), frequencies, weights)
    assert_close(found, torch.tensor(expected, dtype=torch.complex128), rtol=0, atol=1e-7)
    assert_close(wave_integral(WIDE, [0.3]), torch.polar(torch.ones(257).double(), 0.3 * WIDE.double()))
    for wrong in ([], [math.inf], [[1.0]]):
        with pytest.raises(ValueError, match="theta must be a list of finite numbers"):
            wave_integral(WIDE, wrong)
    with pytest.raises(ValueError, match="finite between 0 and 1"):
        wave_integral(WIDE, lambda t: 1 / (t - t))
    with pytest.raises(ValueError, match="oscillate too fast"):
        wave_integral(torch.tensor([10**9]), lambda t: t)


def test_sum_beside_the_integral():
    found = wave_decay(128, 10000.0, pairs=32)
    scheme = decay("sinusoidal", range(-128, 129), dims=Dims(1, 1, 64, 64, 1))
    assert_close(found.sum.real, scheme.scores[0, 0], rtol=0, atol=1e-12)
    assert_close(found.integral.real, sinusoidal_integral(WIDE), rtol=0, atol=1e-11)
    assert_close(found.curves()["sum"].mean, scheme.mean)
    assert found.to_dict()["integral"][128] == [pytest.approx(1), pytest.approx(0)]

    h = [complex(u, 3 - u) for u in range(5)]
    w = [0.5**u for u in range(5)]
    listed = wave_decay([-3, 10], w, h)
    by_hand = [sum(a * cmath.exp(1j * d * b) for a, b in zip(h, w, strict=True)) / 5 for d in (-3, 10)]
    assert_close(listed.sum, torch.tensor(by_hand, dtype=torch.complex128))
    assert_close(wave_sum(torch.tensor([-3, 10]), torch.tensor(w), torch.tensor([h, h]))[1], listed.sum)
    many = wave_decay(128, lambda t: t**2, lambda t: 1 - t, pairs=20000)
    assert_close(many.sum, many.integral, rtol=0, atol=2e-3)  # a left Riemann sum
    with pytest.raises(ValueError, match=r"of different number: \[4, 5\]"):
        wave_decay(3, w, [1.0] * 4)
    with pytest.raises(ValueError, match="of different number"):
        wave_decay(3, w, pairs=6)


def test_waves_weighted_by_a_hessian():
    """The relative part of Su's sixth term, which `expansion` computes from products of the vectors themselves."""
    model, ids = patch_model(tiny("gpt2").double(), "sinusoidal", scale=1.0), tokens(1, 8)[0]
    found = expansion(model, ids, 2, 5, rows=32).diagonal
    weights = (found.diagonal[0::2] + found.diagonal[1::2]) / 2
    weighted = wave_decay([-3, 3], [10000 ** (-u / 16) for u in range(16)], weights)
    assert found.complete
    assert weighted.sum.real.tolist() == pytest.approx([found.relative / 16] * 2, rel=1e-9)


def by_loops(query, key, frequencies, layout, scaling):
    """Mean of q conj(k) over pairs that are not ahead, before rotation, of (T, H, D) each."""
    size, pairs = query.shape[-1], len(frequencies)
    total = torch.zeros(query.shape[1], pairs, dtype=torch.complex128)
    still = torch.zeros(query.shape[1], dtype=torch.float64)
    places = [(u, u + pairs) if layout == "half" else (2 * u, 2 * u + 1) for u in range(pairs)]
    count = 0
    for i in range(len(query)):
        for j in range(i + 1):
            count += 1
            for u, (a, b) in enumerate(places):
                q, k = torch.complex(query[i, :, a], query[i, :, b]), torch.complex(key[j, :, a], key[j, :, b])
                total[:, u] += q * k.conj()
            for n in range(2 * pairs, size):
                still += query[i, :, n] * key[j, :, n]
    return total / count * scaling, still / count * scaling


@pytest.mark.parametrize(("family", "layout"), [("llama", "half"), ("phi", "half"), ("gpt2", "interleaved")])
def test_what_rope_turns_in_a_model(family, layout):
    model, ids = tiny(family).double(), tokens(1, 12)
    if family == "gpt2":
        patch_model(model, "rope", layout=layout)
    found = rotary_weights(model, ids)
    decoder = model.get_decoder()
    with torch.no_grad():
        if family == "gpt2":
            entering = decoder.h[0].ln_1(decoder.wte(ids))
            query, key, _ = decoder.h[0].attn.c_attn(entering)[0].split(model.config.n_embd, -1)
        else:
            layer = decoder.layers[0]
            entering = layer.input_layernorm(decoder.embed_tokens(ids))
            query, key = (getattr(layer.self_attn, name)(entering)[0] for name in ("q_proj", "k_proj"))
    heads = model.config.num_attention_heads
    size = query.shape[-1] // heads
    query, key = query.view(12, heads, size), key.view(12, -1, size)
    key = key.repeat_interleave(heads // key.shape[1], 1)
    pairs = int(size * (model.config.rope_parameters.get("partial_rotary_factor", 1) if family == "phi" else 1)) // 2
    frequencies = torch.tensor([10000.0 ** (-u / pairs) for u in range(pairs)], dtype=torch.float64)
    assert_close(found.frequencies[0], frequencies, rtol=1e-5, atol=0)
    weights, still = by_loops(query, key, frequencies, layout, size**-0.5)
    scale = weights.abs().max().item()
    assert_close(found.weights[0], weights, rtol=0, atol=1e-5 * scale)  # models make cosines in float32
    assert_close(found.still[0], still, rtol=0, atol=1e-5 * scale)
    assert found.layers == (0, 1)
    curve = [
        [(weights[h] * torch.polar(torch.ones(pairs).double(), d * frequencies)).real.sum() for d in (-9, 0, 30)]
        for h in range(heads)
    ]
    expected = torch.tensor(curve).double() + still[:, None]
    assert_close(found.decay([-9, 0, 30]).scores[0], expected, rtol=0, atol=2e-5 * scale * pairs)
    assert found.to_dict()["layers"] == [0, 1]


def test_integral_over_the_weights_of_a_model():
    """Against a fine midpoint sum over weights and frequencies with straight lines between the middles of their shares."""
    model, ids = tiny("llama").double(), tokens(1, 12)
    found = rotary_weights(model, ids)
    pairs = found.weights.shape[-1]
    t = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    place = (t * pairs - 0.5).clamp(0, pairs - 1)
    low = place.long().clamp(max=pairs - 2)

    def between(values):
        return values[low] + (place - low) * (values[low + 1] - values[low])

    frequencies, weights = between(found.frequencies[1]), between(found.weights[1, 2])
    measured = found.integral([-9, 0, 30])
    for column, d in enumerate((-9, 0, 30)):
        angles = d * frequencies
        expected = pairs * (weights.real * angles.cos() - weights.imag * angles.sin()).mean() + found.still[1, 2]
        assert_close(measured.scores[1, 2, column], expected, rtol=0, atol=1e-8 * float(weights.abs().max()))
    assert found.curves([3])["sum"].scores.equal(found.decay([3]).scores)


def test_models_whose_pairs_are_not_looked_at():
    ids = tokens(1, 12)
    with pytest.raises(ValueError, match="rotates nothing"):
        rotary_weights(tiny("gpt2"), ids)
    with pytest.raises(ValueError, match="have different rotations"):
        rotary_weights(patch_model(tiny("llama"), "nope", layers=[1]), ids)
