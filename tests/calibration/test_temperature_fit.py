"""`fit_temperature` finds the strengths that predict best, moves nothing else, and never ends worse."""

import pytest
import torch
from families import tiny
from snapshots import assert_same, snapshot

from hf_posenc import NotPatchedError, fit_temperature, patch_model, unpatch_model
from hf_posenc.schemes import QKNorm, Rope, Temperature

LENGTHS = (16, 40)


def windows(model, count=6):
    """Text that the model itself writes, so that its own temperature, 1, is the best."""
    model.generation_config.eos_token_id = None
    start = torch.randint(3, 97, (count, 1), generator=torch.Generator().manual_seed(3))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return model.generate(start, max_new_tokens=39, do_sample=True, top_k=0, pad_token_id=0)


@pytest.mark.rows(default=1)
@pytest.mark.parametrize("shared", [True, False])
def test_the_temperature_of_the_text_is_found(shared):
    model = tiny("llama").eval()
    tokens = windows(model)
    options = {"trainable": True, "share_heads": shared, "share_layers": shared}
    patch_model(model, [Rope(), QKNorm(), Temperature("constant", strength=0.3, **options)])  # a norm keeps its numbers
    weights = {n: p.clone() for n, p in model.named_parameters() if "strength" not in n}
    fit = fit_temperature(model, tokens, LENGTHS, steps=40, learning_rate=0.05)
    assert sum(fit.after) < sum(fit.before) - 0.05
    values = torch.tensor([value for numbers in fit.strengths.values() for value in numbers])
    assert len(values) == (1 if shared else 8)
    assert (values.mean() - 1).abs() < (values.mean() - 0.3).abs()
    assert all(p.equal(weights[n]) for n, p in model.named_parameters() if n in weights)
    assert all(p.grad is None for p in model.parameters())
    again = fit_temperature(model, tokens, LENGTHS, steps=1, learning_rate=5.0)
    assert (again.steps, again.before) == (0, fit.after)  # one wild step is worse, and is taken back
    assert again.after == again.before
    assert str(LENGTHS[1]) in str(fit)
    assert fit.to_dict()["steps"] == fit.steps > 0


def test_wrong_arguments_change_nothing():
    model = tiny("llama").eval()
    tokens = windows(model, 3)
    with pytest.raises(NotPatchedError, match="patch it with a temperature first"):
        fit_temperature(model, tokens)
    patch_model(model, "temperature", length=8)
    before = snapshot(model)
    with pytest.raises(ValueError, match="trainable=True"):
        fit_temperature(model, tokens)
    unpatch_model(model)
    patch_model(model, "temperature", length=8, trainable=True)
    before = snapshot(model)
    for arguments, message in (
        ({"lengths": (41,)}, "from 2 to 40"),
        ({"lengths": ()}, "from 2 to 40"),
        ({"lengths": (8.0,)}, "from 2 to 40"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"steps": 0}, "steps"),
        ({"held_out": 3}, "windows are too few"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_temperature(model, tokens, **arguments)
    assert_same(snapshot(model), before)
