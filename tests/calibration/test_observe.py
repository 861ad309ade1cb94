"""What calibration reads of the base a second time is what it read the first time."""

import pytest
import torch
from decoders import decoder, has_head
from families import tokens
from transformers import CONFIG_MAPPING

from hf_posenc import patch_model
from hf_posenc.calibration.observe import observe, observe_again
from hf_posenc.calibration.pair import Pair
from hf_posenc.families.refused import missing_release
from hf_posenc.live.patch_record import patch_of
from hf_posenc.registry import supported_model_types

SERVED = [t for t in supported_model_types() if t in CONFIG_MAPPING and missing_release(t) is None]


@pytest.mark.rows(default=24)
@pytest.mark.parametrize("model_type", [t for t in SERVED if has_head(t)])
def test_layers_called_again_read_what_they_read_in_the_pass_that_measured_the_loss(model_type):
    """Queries, keys, values and masks, bit by bit; a layer that is given other hidden states has others."""
    model = patch_model(decoder(model_type).eval(), "nope")
    pair = Pair(model, patch_of(model), None, tokens(6, 16, seed=3), 4)
    pair.loss_of_base()
    (calls,) = pair._base_calls
    with pair.as_base() as base:
        first, again, other = (
            observe(base, pair.held, pair.watched),
            observe_again(base, calls),
            observe(base, pair.held.flip(0), pair.watched),
        )
    for index in pair.layers:
        one, two = first[index].call, again[index].call
        for name in ("query", "key", "value"):
            assert getattr(one, name).equal(getattr(two, name))
            assert not getattr(one, name).equal(getattr(other[index].call, name))
        assert one.positions.visible().equal(two.positions.visible())
        assert torch.equal(first[index].layer.hidden_states, again[index].layer.hidden_states)
