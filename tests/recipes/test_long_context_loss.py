"""LongCE against the formula written out in float64, its gradient, and what is refused."""

import importlib
import json

import pytest
import torch
from recipe_runs import assert_same_weights, in_process, options
from transformers import LlamaForCausalLM

import hf_posenc


@pytest.fixture
def longce(recipes):
    return importlib.import_module("hf_posenc.recipes.long_context_loss")


def probability(model, tokens, target, ids=None):
    """Of a token after others, in float64."""
    more = {} if ids is None else {"position_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model(tokens[None], **more, use_cache=False).logits[0, -1].softmax(-1)[target]


@pytest.mark.parametrize("positions", [None, "chosen"])
def test_longce_is_the_papers(longce, tiny_checkpoints, positions):
    """Fang et al. 2024: -sum min(P(x|long) / P(x|short), limit) log P(x|long), loss and gradient, token by token."""
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoints / "llama", dtype=torch.float64)
    hf_posenc.patch_model(model, "rope")
    torch.manual_seed(0)
    length, context, limit = 18, 8, 1.2
    stride = 2  # a quarter of the context
    tokens = torch.randint(250, (2, length))
    targets = torch.where(torch.rand(2, length) < 0.2, -100, torch.roll(tokens, -1, 1))
    targets[:, -1] = -100
    ids = None if positions is None else torch.tensor([sorted(torch.randperm(60)[:length].tolist()) for _ in range(2)])
    batch = {"input_ids": tokens} | (
        {} if ids is None else {"position_ids": ids, "attention_mask": torch.ones_like(ids)}
    )
    loss, text_loss = longce.LongCE(context, limit).loss(model, batch, targets)
    loss.backward()
    got = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    expected = plain = torch.zeros((), dtype=torch.float64)
    weights = []
    for row in range(2):
        for slot in range(length):
            if (target := targets[row, slot]) == -100:
                continue
            own = None if ids is None else ids[row : row + 1]
            chance = probability(model, tokens[row, : slot + 1], target, own if own is None else own[:, : slot + 1])
            weight = torch.ones((), dtype=torch.float64)
            if slot >= context + stride - 1:
                start = (slot + 1 - context) // stride * stride
                ids_cut = own if own is None else own[:, start : slot + 1]
                short = probability(model, tokens[row, start : slot + 1], target, ids_cut)
                weight = (chance / short).detach().clamp(max=limit)
            weights.append(weight.item())
            expected = expected - weight * chance.log()
            plain = plain - chance.log()
    assert any(weight == limit for weight in weights)
    assert any(0 < weight < 1 for weight in weights)
    assert weights.count(1.0) < len(weights)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert text_loss.item() == pytest.approx(plain.item(), rel=1e-6)
    expected.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(got[name], weight.grad, rtol=1e-5, atol=1e-6)


def test_defaults_are_the_papers(recipe, longce):
    """4096 of 32768 tokens, every 1024, and at most 5."""
    found = longce.LongCE.of(recipe.Arguments(objective="longce", train_length=32768), 32768)
    assert (found.context, found.stride, found.limit) == (4096, 1024, 5.0)


@pytest.mark.slow
def test_a_run_trains_on_it_and_reports_the_text(recipe, tiny_checkpoints, text):
    """The first step's loss is that of the text, whatever the weights; then the weights differ."""
    folder, common = tiny_checkpoints, {"scheme": "rope", "steps": 3, "recovery_steps": 0, "lengths": 16}
    plain = recipe.main(options(folder, text, folder / "plain", **common))
    weighted = recipe.main(options(folder, text, folder / "weighted", **common, objective="longce", longce_context=8))
    one, two = (results["training"]["loss"] for results in (plain, weighted))
    assert two[0] == pytest.approx(one[0], rel=1e-6)
    assert abs(two[-1] - one[-1]) > 1e-5


@pytest.mark.slow
def test_two_processes_equal_one(recipe, recipes, tiny_checkpoints, text):
    """Windows differ in targets; the sum is divided by those of the whole step. Two accumulated passes equal two processes."""
    folder, common = tiny_checkpoints, {"scheme": "alibi", "objective": "longce"}
    one = recipe.main(options(folder, text, folder / "one", **common))
    run = in_process(recipes, options(folder, text, folder / "two", **common, gradient_accumulation=1), 2)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 0, errors
    two = json.loads((folder / "two" / "results.json").read_text())
    assert two["training"]["loss"] == pytest.approx(one["training"]["loss"], abs=1e-5)
    assert_same_weights(folder / "one", folder / "two", 1e-5)


WRONG = {
    "another loss": ({"objective": "longppl"}, "--objective must be one of cross_entropy, longce, not longppl"),
    "a context of none": ({"longce_context": 8}, "--longce-context has no effect without --objective longce"),
    "a limit of none": ({"longce_limit": 2}, "--longce-limit has no effect without --objective longce"),
    "a long context": (
        {"objective": "longce", "longce_context": 40},
        "--longce-context 40 leaves no token of --train-length 48 to weight: give less",
    ),
    "no limit": ({"objective": "longce", "longce_limit": 0}, "--longce-limit must be positive, not 0.0"),
    "a teacher": ({"objective": "longce", "distill": 1}, "--objective longce cannot be combined with --distill"),
    "shared sequences": (
        {"objective": "longce", "context_parallel": 2},
        "--context-parallel cannot be combined with --objective longce",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_weights_that_do_nothing_are_refused(recipe, tiny_checkpoints, text, capsys, case):
    changes, message = WRONG[case]
    with pytest.raises(SystemExit) as stop:
        recipe.main(options(tiny_checkpoints, text, tiny_checkpoints / "out", **changes))
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tiny_checkpoints / "out").exists()
