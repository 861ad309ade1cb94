"""Negative products of queries and keys: against a loop over pairs, written out for one architecture."""

import pytest
import torch
from families import FAMILIES, tiny, tokens

from hf_posenc import patch_model
from hf_posenc.theory import negative_products


@torch.no_grad()
@pytest.mark.parametrize("scheme", [None, "da_transformer"])
def test_negative_products_are_counted_pair_by_pair(scheme):
    model, ids = tiny("gpt2"), tokens(1, 9)
    if scheme:
        patch_model(model, scheme)
    found = negative_products(model, ids)
    states = model(ids, output_hidden_states=True).hidden_states
    for index, block in enumerate(model.transformer.h):
        query, key, _ = block.attn.c_attn(block.ln_1(states[index]))[0].split(32, -1)
        for head in range(4):
            own = slice(8 * head, 8 * head + 8)
            pairs = [query[i, own] @ key[j, own] < 0 for i in range(9) for j in range(i + 1)]
            assert found.shares[index, head].item() == pytest.approx(sum(pairs).item() / 45)
    assert 0.1 < found.shares.mean() < 0.9
    assert found.to_dict()["layers"] == [0, 1]


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in ("llama", "gemma2") else pytest.mark.slow) for family in FAMILIES],
)
def test_families(family):
    """Every token the same, one for all: with positions left out, a product is the square of a norm or its negative."""
    model = patch_model(tiny(family), "nope")
    found = negative_products(model, torch.full((1, 6), 7))
    assert found.shares.dtype == torch.float64
    assert set(found.shares.flatten().tolist()) <= {0.0, 1.0}


def test_a_stock_attention_that_never_calls_the_interface():
    from decoders import decoder

    given, stock = tokens(1, 8), decoder("mpt")  # whose bias is no part of the products
    found = negative_products(stock, given).shares
    assert found.equal(negative_products(patch_model(stock, "alibi"), given).shares)
    assert 0 < found.mean() < 1
