"""What transformers asks of every model class, asked of patched models."""

import pytest
import torch
from families import FAMILIES, tiny
from transformers import AutoModel

from hf_posenc import patch_model

# ------------------------------------------------------------------------------------------------------ new weights


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_starts_as_a_stock_one_does(family):
    """Its stock part, drawn from the same seed. GPT-2, for one, scales some projections as a whole model only."""
    stock = tiny(family).base_model
    config = patch_model(
        tiny(family), "learned"
    ).config  # keeps the length, so that tables of positions take as many draws
    torch.manual_seed(3)
    expected = type(stock)(stock.config).state_dict()
    torch.manual_seed(3)
    actual = AutoModel.from_config(config).state_dict()
    common = [name for name in expected if name in actual]
    assert len(common) > 10
    assert all(actual[name].equal(expected[name]) for name in common)
