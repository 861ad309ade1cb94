"""Dai's four terms: against the formulas written out for one architecture, and what their sum must be."""

import math

import pytest
import torch
from families import FAMILIES, LEARNED, tiny, tokens
from situations import randomize
from torch.testing import assert_close

from hf_posenc import patch_model
from hf_posenc.core.errors import UnsupportedModelError
from hf_posenc.theory import expansion, score_terms

EXACT = {"rtol": 1e-9, "atol": 1e-12}


def measured(terms):
    """Shares of terms (H, T, T), query by query as the definition says."""
    shares = []
    for head in zip(*terms, strict=True):
        covariances, total = [0.0] * 4, 0.0
        for query in range(len(head[0])):
            keys = [term[query, : query + 1] - term[query, : query + 1].mean() for term in head]
            score = sum(keys)
            total += (score * score).sum().item()
            for index, term in enumerate(keys):
                covariances[index] += (term * score).sum().item()
        shares.append([each / total for each in covariances])
    return torch.tensor(shares, dtype=torch.float64)


def heads(vectors):
    return vectors.view(len(vectors), 4, 8).transpose(0, 1)


@torch.no_grad()
def test_absolute_terms_are_those_of_the_formula():
    """The norm's divisor is that of the sum; its bias and the projection's are content."""
    model, ids = tiny("gpt2").double(), tokens(1, 12)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)).double())
    found = score_terms(model, ids)
    states = model(ids, output_hidden_states=True).hidden_states
    position = model.transformer.wpe.weight[:12]
    assert found.names == ("content-content", "content-position", "position-content", "position-position")
    for layer, block in zip(found.layers, model.transformer.h, strict=True):
        whole = states[layer.index][0]
        centred = whole - whole.mean(-1, keepdim=True)
        divisor = (centred.square().mean(-1, keepdim=True) + block.ln_1.eps).sqrt()

        def behind_norm(part, norm=block.ln_1, divisor=divisor):
            return norm.weight * (part - part.mean(-1, keepdim=True)) / divisor

        content = (behind_norm(whole - position) + block.ln_1.bias) @ block.attn.c_attn.weight
        content = content + block.attn.c_attn.bias
        place = behind_norm(position) @ block.attn.c_attn.weight
        queries, keys = ([heads(part[:, at : at + 32]) for part in (content, place)] for at in (0, 32))
        products = [query @ key.mT / math.sqrt(8) for query in queries for key in keys]
        shares = measured(products)
        assert_close(layer.shares, shares, **EXACT)
        assert_close(layer.shares.sum(-1), torch.ones(4, dtype=torch.float64))
    assert found.layers[0].shares[:, 3].min() > 0.05  # positions are as large as tokens here


@torch.no_grad()
def test_transformer_xl_says_its_own_terms():
    model = randomize(patch_model(tiny("gpt2").double(), "transformer_xl", longest=10000))
    ids = tokens(1, 12)
    found = score_terms(model, ids)
    states = model(ids, output_hidden_states=True).hidden_states
    waves = torch.tensor([10000 ** (-2 * u / 32) for u in range(16)], dtype=torch.float64)
    distances = torch.arange(12, dtype=torch.float64)[:, None] * waves
    sinusoids = torch.cat([distances.sin(), distances.cos()], -1)
    lag = (torch.arange(12)[:, None] - torch.arange(12)).clamp(min=0)
    assert found.names == ("content-content", "content-distance", "bias-content", "bias-distance")
    for layer, block in zip(found.layers, model.transformer.h, strict=True):
        query, key, _ = block.attn.c_attn(block.ln_1(states[layer.index]))[0].split(32, -1)
        query, key = heads(query), heads(key)
        module = block.attn.posenc
        relative = heads(sinusoids @ module.position_projection.double().T)  # (H, distances, D)
        u, v = module.content_bias.double(), module.position_bias.double()
        terms = [
            query @ key.mT,
            torch.einsum("hid,hijd->hij", query, relative[:, lag]),
            torch.einsum("hd,hjd->hj", u, key)[:, None].expand(-1, 12, -1),
            torch.einsum("hd,hijd->hij", v, relative[:, lag]),
        ]
        shares = measured([term / math.sqrt(8) for term in terms])
        assert_close(layer.shares, shares, **EXACT)


def test_a_form_s_terms_are_its_scores():
    from dataclasses import replace

    from hf_posenc.core.attention_call import Call
    from hf_posenc.core.dims import Dims
    from hf_posenc.core.positions import Positions
    from hf_posenc.schemes.transformer_xl import TransformerXL

    torch.manual_seed(0)
    module = TransformerXL().build(Dims(num_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=32, num_layers=1))
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.normal_()
        # Queries that are scaled already, as some families hand them over.
        call = Call(
            *(torch.randn(2, heads, 7, 8, dtype=torch.float64) for heads in (4, 2, 2)),
            Positions.causal(7),
            scaling=1.0,
            vector_scaling=8**-0.5,
        )
        call = replace(call, module=module, form=module.form(call.query)).widened()
        assert_close(torch.stack(list(call.form.terms(call).values())).sum(0), call.form.scores(call))


QUICK = ("gpt2", "opt", "gemma2", "olmo2")


@pytest.mark.parametrize("placement", ["input", "every_layer"])
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES]
)
def test_families(family, placement):
    model, ids = tiny(family), tokens(2, 12)
    if family not in LEARNED:
        with pytest.raises(ValueError, match="no layer with the four terms"):
            score_terms(model, ids)
    if placement == "every_layer" or family not in LEARNED:
        patch_model(model, "sinusoidal", placement=placement)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    implementation = model.config._attn_implementation
    found = score_terms(model, ids)
    assert [layer.index for layer in found.layers] == [0, 1]
    for layer in found.layers:
        assert_close(layer.shares.sum(-1), torch.ones(4, dtype=torch.float64))
        assert (layer.shares[:, 1:] != 0).all()
    assert model.config._attn_implementation == implementation
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert "position-position" in str(found)
    assert len(found.to_dict()["layers"]) == 2


def test_wrong_calls():
    mixed = patch_model(tiny("llama"), "transformer_xl", layers=[1])
    assert [layer.index for layer in score_terms(mixed, tokens(1, 12)).layers] == [1]
    with pytest.raises(ValueError, match=r"four terms in the layers \[1\]"):
        score_terms(mixed, tokens(1, 12), layers=[0])


def test_vectors_that_do_not_stay_in_the_hidden_states():
    """Norms behind the sum: the first layer still reads the vectors, the second no longer."""
    model = tiny("opt", do_layer_norm_before=False)
    assert [layer.index for layer in score_terms(model, tokens(1, 12), layers=range(1)).layers] == [0]
    with pytest.raises(UnsupportedModelError, match="layer 0 of OPTForCausalLM replaces its hidden states"):
        score_terms(model, tokens(1, 12))


def test_experts_and_code_that_makes_constants_of_its_own():
    """Experts that are computed all at once take no float64; the other family makes the lowest float64 a constant."""
    from decoders import decoder

    experts = patch_model(decoder("mixtral"), "sinusoidal")
    assert len(score_terms(experts, tokens(1, 8)).layers) == 2
    assert expansion(experts, tokens(1, 8), 2, 5, rows=2).output.mixed.abs() > 0
    assert torch.get_default_dtype() == torch.float32
    sinusoids_of_its_own = decoder("xglm")
    assert expansion(sinusoids_of_its_own, tokens(1, 8), 2, 5, rows=2).output.mixed.abs() > 0
    with pytest.raises(UnsupportedModelError, match="does not call transformers' attention interface"):
        score_terms(sinusoids_of_its_own, tokens(1, 8))
    kept = patch_model(decoder("gpt_neo"), "learned")
    assert [layer.index for layer in score_terms(kept, tokens(1, 8)).layers] == [0, 1]
