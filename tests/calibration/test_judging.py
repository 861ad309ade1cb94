"""Calibration decides by what the model predicts, follows no wrong teacher, and says what it did."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from families import tiny
from matrix import matrix
from snapshots import assert_same, snapshot

import hf_posenc
from hf_posenc import Matching, calibrate, patch_model, unpatch_model
from hf_posenc.calibration.pair import Pair
from hf_posenc.calibration.report import HeldOutLoss
from hf_posenc.schemes.alibi import Alibi

LENGTH, INF = 24, math.inf


@pytest.fixture(scope="module")
def written():
    """Text that a model with random weights writes: of all models, it predicts this text best on average."""
    kept = {}

    def of(family, count=24):
        if (family, count) not in kept:
            model, generator = tiny(family).eval(), torch.Generator().manual_seed(7)
            rows = torch.randint(97, (count, 1), generator=generator)
            with torch.no_grad():
                while rows.shape[1] < LENGTH:
                    likely = model(rows, use_cache=False).logits[:, -1].softmax(-1)
                    rows = torch.cat([rows, torch.multinomial(likely, 1, generator=generator)], 1)
            kept[family, count] = rows
        return kept[family, count]

    return of


@torch.no_grad()
def loss(model, windows, labels=None):
    """Mean cross entropy of the next token, over labels that are not -100."""
    model.eval()
    logits = model(windows, use_cache=False).logits[:, :-1].double()
    wanted = (windows if labels is None else labels)[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1)[wanted != -100], wanted[wanted != -100]).item()


# ----------------------------------------------------------------------------------------------------- what decides


@pytest.mark.rows(default=2)
@matrix(scheme=["t5", "alibi", "kerple", "transformer_xl", "nope", "sinusoidal"], family=["llama", "gpt2"])
def test_no_model_predicts_worse_than_its_swap(scheme, family, written):
    windows = written(family)
    options = {"alibi": {"trainable": True}}.get(scheme, {})
    model = tiny(family)
    expected = {"base": loss(model, windows[-8:])}
    patch_model(model, scheme, seed=0, **options)
    expected["swapped"] = loss(model, windows[-8:])
    report = calibrate(model, windows, matching=Matching(steps=20, weight_rate=3e-3))
    expected["calibrated"] = loss(model, windows[-8:])
    for name, value in expected.items():
        assert abs(getattr(report.held_out_loss, name) - value) < 1e-5
    assert expected["calibrated"] <= expected["swapped"] + 0.01
    assert expected["base"] < expected["swapped"]
    assert f"base {expected['base']:.3f}, swapped {expected['swapped']:.3f}" in str(report)
    said = model.config.position_encoding.get("calibration")
    if report.kept == "nothing":
        assert said is None
    else:
        assert abs(said["held_out_loss"]["calibrated"] - expected["calibrated"]) < 1e-5
        assert said["stage"] == ("closed_form" if report.kept == "closed_form" else "matching")


def test_tokens_without_a_label_do_not_count(written):
    """In no loss, and so in no decision: here on tokens that the base predicts badly."""
    windows = written("llama").clone()
    half = LENGTH // 2
    windows[:, half:] = torch.randint(97, (len(windows), half), generator=torch.Generator().manual_seed(3))
    labels = windows.clone()
    labels[:, half:] = -100
    labels[-1] = -100  # a window without a label
    reports = []
    for given in (None, labels):
        model = tiny("llama")
        expected = {"base": loss(model, windows[-8:], None if given is None else given[-8:])}
        patch_model(model, "t5", share_layers=False, seed=0)
        expected["swapped"] = loss(model, windows[-8:], None if given is None else given[-8:])
        report = calibrate(model, windows, labels=given, matching=None)
        expected["calibrated"] = loss(model, windows[-8:], None if given is None else given[-8:])
        for name, value in expected.items():
            assert getattr(report.held_out_loss, name) == pytest.approx(value, abs=1e-5)
        reports.append(report)
    every, some = reports
    assert some.held_out_loss.base < every.held_out_loss.base - 0.1


@pytest.mark.rows(default=1)
@pytest.mark.parametrize(
    ("losses", "kept", "put_back"),
    [
        # swapped; heads by attention; turned, both, fitted; outputs; logits
        ([4.0, 3.0, 3.5, 3.2, 3.1, 2.5, 2.4], "logits", {}),
        ([4.0, 3.0, 3.5, 3.2, 3.1, 2.5, 2.5], "outputs", {"logits": 2.5}),
        ([4.0, 3.0, 3.5, 3.2, 3.1, 3.2, 2.9], "logits", {"outputs": 3.2}),
        ([3.0, 4.0, 3.5, 2.5, 3.1, 3.7, 2.6], "closed_form", {"heads": 4.0, "outputs": 3.7, "logits": 2.6}),
        ([3.0, 4.0, 3.8, 3.7, 3.6, 3.7, 3.2], "nothing", {"heads": 4.0, "outputs": 3.7, "logits": 3.2}),
        ([3.0, INF, INF, 2.5, 3.1, INF, 2.4], "logits", {"heads": INF, "outputs": INF}),
    ],
)
def test_losses_decide(losses, kept, put_back, written, monkeypatch):
    model = patch_model(tiny("llama"), "t5", share_layers=False, seed=0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    said = iter(losses)
    monkeypatch.setattr(Pair, "loss", lambda pair, values=(), of=None: next(said) if of is None else 2.0)
    report = calibrate(model, written("llama"), matching=Matching(steps=2))
    assert list(said) == []
    assert report.kept == kept
    assert dict(report.put_back) == put_back
    moved = any(not p.equal(before[name]) for name, p in model.named_parameters())
    assert moved is (kept != "nothing")
    if "heads" in put_back and kept != "nothing":
        assert all(set(layer.chosen) == {"turned, fitted"} for layer in report.layers)
    assert str(report).startswith("t5: calibration won nothing") is (kept == "nothing")
    assert json.loads(json.dumps(report.to_dict()))["kept"] == kept


FITTED = "with trainable=True, so that alibi can be fitted"
SECOND = "Take the second stage too (matching=), or patch"
OTHERS = "with another scheme, or with fewer layers (layers=)"


@pytest.mark.parametrize(
    ("scheme", "losses", "advice"),
    [
        (Alibi(), (3.723, 9.016, 8.516), f"little: {{}}. {SECOND} again {FITTED}, or {OTHERS}"),  # a tenth is 0.529
        (Alibi(trainable=True), (3.723, 9.016, 8.416), None),
        ("rope", (3.723, 3.725, 3.725), "nothing: {}"),  # there was nothing to win
    ],
)
def test_the_first_line_says_that_little_was_won(scheme, losses, advice, written):
    """With losses of SmolLM2-135M, in nats."""
    base, swapped, calibrated = losses
    report = calibrate(patch_model(tiny("llama"), scheme), written("llama"), matching=None)
    report = replace(report, held_out_loss=HeldOutLoss(base, swapped, calibrated, calibrated))
    numbers = f"held-out loss {calibrated:.3f} nats, {swapped:.3f} before, {base:.3f} of the base"
    first = "" if advice is None else f"{report.scheme}: calibration won {advice.format(numbers)} "
    assert " ".join(str(report).split()).startswith(f"{first}{report.scheme}: calibrated with")
    assert SECOND not in str(replace(report, put_back={"outputs": 9.1}))  # which has had it


# ------------------------------------------------------------------------------------------------------ the teacher


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda model: model, "base is the model that is calibrated"),
        (lambda model: "gpt2", "base must be a transformers model, not a str"),
        (lambda model: tiny("gpt2"), "its type is gpt2, the model's llama"),
        (lambda model: tiny("llama", num_hidden_layers=3), "its number of layers is 3, the model's 2"),
        (lambda model: tiny("llama").double(), "its dtype is torch.float64, the model's torch.float32"),
    ],
)
def test_a_wrong_base_is_refused(base, message, written):
    model = patch_model(tiny("llama"), "t5", seed=0)
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        calibrate(model, written("llama"), matching=None, base=base(model))
    assert_same(snapshot(model), before)


@pytest.mark.slow
def test_moved_weights_are_no_teacher_across_patches(written):
    windows, stock = written("llama"), tiny("llama")
    model = patch_model(tiny("llama"), "nope")
    calibrate(model, windows, matching=Matching(steps=2), judge="attention")
    with pytest.warns(UserWarning, match="they stay changed: load the checkpoint again"):
        unpatch_model(model)
    patch_model(model, "t5", seed=0)
    with pytest.raises(ValueError, match="weights of this model have changed"):
        calibrate(model, windows)
    unpatch_model(model)
    model.load_state_dict(stock.state_dict())
    unpatch_model(patch_model(model, "alibi"))
    assert not [name for name in vars(model.model) if "posenc" in name]  # nothing is left of it
    patch_model(model, "t5", seed=0)
    calibrate(model, windows, matching=None)
    with pytest.warns(UserWarning, match="they stay changed"), hf_posenc.patched(tiny("llama"), "nope") as other:
        calibrate(other, windows, matching=Matching(steps=2), judge="attention")


@pytest.mark.rows(default=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trained_weights_are_no_teacher(dtype, written):
    model = patch_model(tiny("llama"), "t5", seed=0).to(dtype)
    calibrate(copy.deepcopy(model), written("llama"), matching=None)  # a cast is no training
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if "posenc" not in n], lr=0.5)
    model(written("llama"), labels=written("llama")).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="have changed since it was patched, by a calibration or in training"):
        calibrate(model, written("llama"))


# --------------------------------------------------------------------------------------------------------- adapters


@pytest.mark.parametrize(
    "scheme", ["t5", "nope", *(pytest.param(name, marks=pytest.mark.slow) for name in ("alibi", "transformer_xl"))]
)
def test_an_adapter_holds_all_that_calibration_moved(scheme, written, tmp_path):
    from peft import get_peft_model

    windows = written("llama")

    def patched():
        return patch_model(tiny("llama"), scheme, seed=0)

    model = patched()
    # One that leaves the queries' projection alone, so that nothing but closed forms could turn it.
    config = hf_posenc.lora_config(model, r=2, target_modules=["k_proj", "v_proj"])
    adapted = get_peft_model(model, config)
    stock = {name: p.clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    report = calibrate(adapted, windows, matching=Matching(steps=5, rate=1e-3), judge="attention")
    assert report.kept == "attention"
    assert all(p.equal(stock[name]) for name, p in adapted.named_parameters() if name in stock)
    adapted.save_pretrained(tmp_path)
    loaded = hf_posenc.load_adapter(patched(), tmp_path)
    with torch.no_grad():
        assert (loaded(windows).logits - adapted(windows).logits).abs().max() < 1e-6
        assert (patched()(windows).logits - adapted(windows).logits).abs().max() > 1e-2
    with pytest.raises(ValueError, match="trains weights that no adapter holds"):
        calibrate(get_peft_model(patched(), config), windows, matching=Matching(weights="query_key"))
    with pytest.raises(ValueError, match="have changed since it was patched"):  # now it is the adapter that has moved
        calibrate(adapted, windows)


@pytest.mark.rows(default=1)
@matrix(put=["wrapped", "inside"], scheme=["t5", "shaw", "alibi"])
def test_an_adapter_that_saves_the_schemes_modules_by_name(scheme, put, written):
    """Also one that transformers put inside the model, with no wrapper around: nothing else moves then."""
    from peft import LoraConfig, get_peft_model

    model = patch_model(tiny("llama"), scheme, seed=0)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], modules_to_save=["posenc"])
    if put == "wrapped":
        adapted = get_peft_model(model, config)
    else:
        model.add_adapter(config)
        adapted = model
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in adapted.named_parameters()}
    report = calibrate(adapted, written("llama"), matching=Matching(steps=3, rate=1e-3), judge="attention")
    assert report.kept == "attention"
    now = dict(adapted.named_parameters())
    moved = {name for name, (value, _) in before.items() if not now[name].equal(value)}
    assert moved
    assert all(before[name][1] for name in moved)
    assert {name: p.requires_grad for name, p in now.items()} == {name: flag for name, (_, flag) in before.items()}
    with pytest.raises(ValueError, match="have changed since it was patched"):
        calibrate(adapted, written("llama"))


@pytest.mark.filterwarnings("ignore:this adapter neither trains nor saves:UserWarning")
def test_an_adapter_that_would_lose_the_scheme_is_refused(written):
    from peft import LoraConfig, get_peft_model

    model = patch_model(tiny("llama"), "t5", seed=0)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj"]))
    with pytest.raises(ValueError, match="neither trains nor saves the scheme's parameters"):
        calibrate(adapted, written("llama"))


# ------------------------------------------------------------------------------------------------ whoever calls it


@pytest.mark.slow
def test_modes_of_the_caller_change_nothing(written):
    found = []
    for mode in (torch.enable_grad(), torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        model = patch_model(tiny("llama"), "t5", share_layers=False, seed=0)
        with mode:
            report = calibrate(model, written("llama"), matching=Matching(steps=3), judge="attention")
        found.append((report.to_dict(), [p.detach().clone() for p in model.parameters()]))
    for numbers, parameters in found[1:]:
        assert numbers == found[0][0]
        assert all(a.equal(b) for a, b in zip(parameters, found[0][1], strict=True))
    assert found[0][0]["kept"] == "attention"


# ------------------------------------------------------------------------------------------------------------ state


@pytest.mark.slow
@pytest.mark.parametrize(("weight_rate", "steps", "kept"), [(5.0, 3, "closed_form"), (1e-3, 8, "outputs")])
def test_trials_go_on_where_they_were(weight_rate, steps, kept, written, tmp_path):
    """Also in the second of them, whether the result of the first was kept or put back."""
    path, case = tmp_path / "state", {"weights": "query_key", "steps": steps, "weight_rate": weight_rate}

    def run(stop=None, **given):
        model, made = patch_model(tiny("llama"), "t5", share_layers=False, seed=0), []

        def on_step(step, value):
            made.append(value)
            if len(made) == stop:
                raise KeyboardInterrupt

        try:
            report = calibrate(model, written("llama"), matching=Matching(on_step=on_step, **case, **given))
        except KeyboardInterrupt:
            report = None
        return model, report, made

    whole, expected, made = run()
    assert len(made) == 2 * steps
    assert expected.kept == kept
    _, none, first = run(stop=steps + 2, state_file=path)
    assert none is None
    resumed, report, rest = run(state_file=path)
    assert first + rest == made
    assert report.to_dict() == expected.to_dict()
    theirs = dict(whole.named_parameters())
    assert all(p.equal(theirs[name]) for name, p in resumed.named_parameters())
