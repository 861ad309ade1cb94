"""Calibration decides by what the model predicts, follows no wrong teacher, and says what it did."""

import copy
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from families import tiny, tokens
from matrix import matrix
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from snapshots import assert_same, snapshot

import hf_posenc
from hf_posenc import CheckpointError, Matching, calibrate, patch_model, unpatch_model
from hf_posenc.calibration.checks import CLOSED_WINDOWS, HELD_OUT, number_of_windows
from hf_posenc.calibration.pair import Pair
from hf_posenc.live.patch_record import patch_of

LENGTH = 24


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
        assert said["stage"] == ("closed_form" if report.kept == "closed_form" else "attention")


def test_tokens_without_a_label_do_not_count(written):
    """In no loss, and so in no decision: here on tokens that the base predicts badly."""
    windows = written("llama").clone()
    half = LENGTH // 2
    windows[:, half:] = torch.randint(97, (len(windows), half), generator=torch.Generator().manual_seed(3))
    labels = windows.clone()
    labels[:, half:] = -100
    labels[-1] = -100  # a window without a label
    reports = []
    for given in (None, windows, labels):
        model = tiny("llama")
        expected = {"base": loss(model, windows[-8:], None if given is None else given[-8:])}
        patch_model(model, "t5", share_layers=False, seed=0)
        expected["swapped"] = loss(model, windows[-8:], None if given is None else given[-8:])
        report = calibrate(model, windows, labels=given, matching=Matching(steps=5))
        expected["calibrated"] = loss(model, windows[-8:], None if given is None else given[-8:])
        for name, value in expected.items():
            assert getattr(report.held_out_loss, name) == pytest.approx(value, abs=1e-5)
        reports.append(report)
    every, same, some = reports
    assert every.held_out_loss == same.held_out_loss
    assert some.held_out_loss.base < every.held_out_loss.base - 0.1


@pytest.mark.slow
def test_a_second_stage_that_predicts_worse_is_put_back_and_named(written):
    windows = written("llama")
    model, other = (patch_model(tiny("llama"), "t5", share_layers=False, seed=0) for _ in range(2))
    closed = calibrate(other, windows, matching=None)
    report = calibrate(model, windows, matching=Matching(steps=3, weight_rate=5.0))
    assert report.kept == closed.kept == "closed_form"
    assert set(report.put_back) == {"attention", "outputs"}
    assert min(report.put_back.values()) > report.held_out_loss.closed_form + 0.01
    theirs = dict(other.named_parameters())
    assert all(p.equal(theirs[name]) for name, p in model.named_parameters())
    assert "Taken back, because it predicted no better: matching outputs" in str(report)
    assert report.held_out_loss.calibrated == report.held_out_loss.closed_form == closed.held_out_loss.calibrated
    assert model.config.position_encoding["calibration"]["stage"] == "closed_form"


@pytest.mark.rows(default=1)
@pytest.mark.parametrize(
    ("losses", "kept", "put_back"),
    [
        # swapped; heads by attention; turned, both, fitted; outputs; attention
        ([4.0, 3.0, 3.5, 3.2, 3.1, 2.5], "outputs", {}),
        ([4.0, 3.0, 3.5, 3.2, 3.1, 3.2, 2.9], "attention", {"outputs": 3.2}),
        (
            [3.0, 4.0, 3.5, 2.5, 3.1, 3.7, 2.6],
            "closed_form",
            {"heads": 4.0, "outputs": 3.7, "attention": 2.6},
        ),
        (
            [3.0, 4.0, 3.8, 3.7, 3.6, 3.7, 3.2],
            "nothing",
            {"heads": 4.0, "outputs": 3.7, "attention": 3.2},
        ),
        (
            [3.0, math.inf, math.inf, 2.5, 3.1, math.inf, 2.4],
            "attention",
            {"heads": math.inf, "outputs": math.inf},
        ),
    ],
)
def test_losses_decide(losses, kept, put_back, written, monkeypatch):
    model = patch_model(tiny("llama"), "t5", share_layers=False, seed=0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    said = iter(losses)
    monkeypatch.setattr(
        Pair, "token_losses", lambda pair, values=(), rival=None: torch.tensor([next(said)], dtype=torch.float64)
    )
    report = calibrate(model, written("llama"), matching=Matching(steps=2))
    assert list(said) == []
    assert report.kept == kept
    assert dict(report.put_back) == put_back
    moved = any(not p.equal(before[name]) for name, p in model.named_parameters())
    assert moved is (kept != "nothing")
    if "heads" in put_back and kept != "nothing":
        assert all(set(layer.chosen) == {"turned, fitted"} for layer in report.layers)
    assert ("the model is as it was" in str(report)) is (kept == "nothing")
    assert json.loads(json.dumps(report.to_dict()))["kept"] == kept


@pytest.mark.slow
def test_shared_parameters_say_what_their_own_would_come_to(written):
    """The divergence that is named for parameters of their own is that of a model that has them: of a base, nearly 0."""
    base = patch_model(tiny("llama"), "t5", share_layers=False, seed=1)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for layer in base.model.layers:
            for p in layer.self_attn.posenc.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))
    found = {}
    for share in (True, False):
        model = patch_model(tiny("llama"), "t5", share_layers=share, seed=0)
        found[share] = calibrate(model, written("llama"), matching=None, base=base, judge="attention")
    together, apart = found[True].apart
    means = {share: sum(each.closed.mean().item() for each in report.layers) / 2 for share, report in found.items()}
    assert found[False].apart is None
    assert abs(together - means[True]) < 1e-6
    assert abs(apart - means[False]) < 1e-4
    assert apart < 1e-3 < together
    assert f"(share_layers=False) closed forms reach a divergence of {apart:.3f} nats" in found[True].remarks()[0]
    assert "share_layers" not in str(found[False])


LOSSES = torch.rand(1024, generator=torch.Generator().manual_seed(7), dtype=torch.float64)  # of four windows


@pytest.mark.parametrize(
    ("more", "spread", "read"),
    [
        (0.5, 0.1, 1),
        (0.0, 0.0, 1),  # equal: no lower by 0.01
        (-0.005, 0.001, 1),
        (0.0, 1.0, 4),  # undecided to the end
        (-0.05, 0.1, 4),
        (math.nan, 0.0, 1),
    ],
)
def test_a_form_that_cannot_win_is_not_read_to_the_end(more, spread, read, monkeypatch):
    model = patch_model(tiny("llama"), "nope")
    pair = Pair(model, patch_of(model), None, tokens(6, 24, seed=3), 4)
    noise = torch.randn(1024, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    losses, asked = LOSSES + more + spread * (noise - noise.mean()), []

    def next_window(*_):
        asked.append(losses.split(256)[len(asked) % 4])
        return asked[-1]

    monkeypatch.setattr("hf_posenc.calibration.pair.losses_of", next_window)
    found = pair.loss(rival=LOSSES)
    assert len(asked) == read
    assert found == (pytest.approx(losses.mean().item()) if read == 4 else math.inf)
    asked.clear()
    assert (pair.loss() == pytest.approx(losses.mean().item())) is not math.isnan(more)
    assert pair.loss(rival=torch.full_like(LOSSES, math.inf)) == pair.loss()  # what diverged stops nobody
    assert len(asked) == 12


def test_a_rivals_losses_are_those_of_the_same_tokens(written):
    """Calibration gives the losses of heads by attention to each form for all heads; a form that is equal is not read on."""
    model = patch_model(tiny("llama"), "t5", share_layers=False, seed=0)
    pair, read = Pair(model, patch_of(model), None, written("llama", 40), 24), []
    losses = pair.token_losses()
    assert pair.loss() == losses.mean().item()
    with torch.no_grad():
        expected = model(pair.held, labels=pair.held).loss.item()
    assert losses.mean().item() == pytest.approx(expected, abs=1e-5)
    handle = model.register_forward_pre_hook(lambda *_: read.append(1))
    assert pair.loss(rival=losses) == math.inf
    handle.remove()
    assert len(read) == math.ceil(256 / (pair.held.shape[1] - 1)) < len(pair.held)


# --------------------------------------------------------------------------------------------------- what was read


def test_only_tokens_that_were_read_are_counted(written):
    windows = written("llama", 60)
    model = patch_model(tiny("llama"), "nope")
    report = calibrate(model, windows, matching=None, closed_windows=5, held_out=3, judge="attention")
    assert report.tokens == (5 + 3) * LENGTH
    assert model.config.position_encoding["calibration"]["tokens"] == (5 + 3) * LENGTH


# ------------------------------------------------------------------------------------------------------ the teacher


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (lambda model: model, "base is the model that is calibrated"),
        (lambda model: "gpt2", "base must be a transformers model, .* not a str"),
        (lambda model: tiny("gpt2"), "it is a gpt2, the model a llama"),
        (lambda model: tiny("llama", num_hidden_layers=3), "its number of layers is 3, the model's 2"),
        (lambda model: tiny("llama", vocab_size=120), "its vocabulary is 120, the model's 97"),
        (lambda model: tiny("llama", num_key_value_heads=4), "its sizes of the attention is"),
        (lambda model: tiny("llama").double(), "its dtype is torch.float64, the model's torch.float32"),
    ],
)
def test_a_wrong_base_is_refused(base, message, written):
    model = patch_model(tiny("llama"), "t5", seed=0)
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        calibrate(model, written("llama"), matching=None, base=base(model))
    assert_same(snapshot(model), before)


def test_a_base_that_shares_weights_is_refused(written):
    model = patch_model(tiny("llama"), "t5", seed=0)
    base = tiny("llama")
    base.model.embed_tokens.weight = model.model.embed_tokens.weight
    with pytest.raises(ValueError, match="shares weights with it"):
        calibrate(model, written("llama"), matching=None, base=base)


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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use
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
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use
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


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT's own use
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
    for mode in (torch.enable_grad(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)):
        model = patch_model(tiny("llama"), "t5", share_layers=False, seed=0)
        with mode:
            report = calibrate(model, written("llama"), matching=Matching(steps=3), judge="attention")
        found.append((report.to_dict(), [p.detach().clone() for p in model.parameters()]))
    for numbers, parameters in found[1:]:
        assert numbers == found[0][0]
        assert all(a.equal(b) for a, b in zip(parameters, found[0][1], strict=True))
    assert found[0][0]["kept"] == "attention"
    model = patch_model(tiny("llama"), "t5", seed=0)
    with torch.inference_mode(), pytest.raises(ValueError, match="call it outside"):
        calibrate(model, written("llama"))


@pytest.mark.parametrize("scheme", ["t5", "alibi", "nope"])
def test_a_window_is_matched_with_what_it_shows(scheme, written):
    """The divergence is that from the base's weights on the keys within the window, which sum to one."""
    windows, window = written("llama"), 4
    model = patch_model(tiny("llama"), scheme, window=window, seed=0)
    pair = Pair(model, patch_of(model), None, windows, 8)
    found = pair.divergence()[0].double()
    stock = tiny("llama", attn_implementation="eager").double()
    q, k = {}, {}
    attention = stock.model.layers[0].self_attn
    with torch.no_grad():
        held = windows[-8:]
        x = stock.model.layers[0].input_layernorm(stock.model.embed_tokens(held))
        q, k = (p(x).view(8, LENGTH, -1, 8).transpose(1, 2) for p in (attention.q_proj, attention.k_proj))
        k = k.repeat_interleave(2, 1)
        angles = torch.arange(LENGTH)[:, None] * 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)

        def turned(v):
            z = torch.complex(v[..., :4], v[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
            return torch.cat([z.real, z.imag], -1)

        lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        hidden = (lag < 0) | (lag >= window)
        theirs = (turned(q) @ turned(k).mT * 8**-0.5).masked_fill(hidden, -torch.inf).log_softmax(-1)
        slopes = torch.tensor([2.0 ** (-2 * (h + 1)) for h in range(4)], dtype=torch.float64)
        added = -slopes[:, None, None] * lag if scheme == "alibi" else 0.0  # buckets begin at zero, on this model
        if scheme == "t5":
            added = model.model.layers[0].self_attn.posenc.owner().form(torch.empty(0)).table(LENGTH).double()
            added = added[:, lag.clamp(min=0)]
        ours = (q @ k.mT * 8**-0.5 + added).masked_fill(hidden, -torch.inf).log_softmax(-1)
        kl = torch.where(hidden, 0.0, theirs.exp() * (theirs - ours)).sum(-1).mean((0, 2))
    assert torch.allclose(found, kl, rtol=1e-4, atol=1e-6)
    report = calibrate(model, windows, matching=Matching(steps=3), judge="attention")
    assert all(layer.closed.mean() <= layer.before.mean() for layer in report.layers)


# ------------------------------------------------------------------------------------------------------------ state


@pytest.mark.slow
def test_a_state_with_something_missing_or_wrong_changes_nothing(written, tmp_path):
    windows, path, wrong = written("llama"), tmp_path / "state.safetensors", tmp_path / "wrong.safetensors"

    def run(state):
        model = patch_model(tiny("llama"), "t5", share_layers=False, seed=0)
        before = snapshot(model)
        try:
            calibrate(
                model, windows, matching=Matching(steps=4, state_file=state, on_step=lambda step, _: 1 // (2 - step))
            )
        except ZeroDivisionError:
            return
        except CheckpointError as error:
            assert_same(snapshot(model), before)
            return str(error)

    run(path)
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    parameter = next(name for name in tensors if name.startswith("parameter.") and tensors[name].ndim == 2)
    adam = next(name for name in tensors if name.startswith("adam.exp_avg."))
    for name, change, message in (
        ("random", lambda t: None, "random is missing"),
        (parameter, lambda t: None, "is missing"),
        ("before.0", lambda t: None, "before.0 is missing"),
        (adam, lambda t: None, "is missing"),
        (parameter, lambda t: t * math.nan, "not finite"),
        (parameter, lambda t: t[:1], r"is \(1, "),
        (parameter, lambda t: t.double(), "of torch.float64, not"),
        ("closed.1", lambda t: t[:1], r"closed.1 is \(1,\)"),
        ("another", lambda t: torch.ones(1), "another is unexpected"),
    ):
        changed = dict(tensors)
        value = change(tensors.get(name))
        if value is None:
            del changed[name]
        else:
            changed[name] = value.contiguous()
        save_file(changed, wrong, metadata)
        said = run(wrong)
        assert said is not None, name
        assert "is not the whole state of a calibration" in said
        assert re.search(message, said), said
    entry = json.loads(metadata["hf_posenc_calibration"])
    del entry["first_stage"]
    save_file(tensors, wrong, {"hf_posenc_calibration": json.dumps(entry)})
    assert "is not the whole state" in run(wrong)


@pytest.mark.slow
def test_trials_go_on_where_they_were(written, tmp_path):
    """Also in the second of them, and with the loss of the first that was put back."""
    path, case = tmp_path / "state", {"steps": 3, "weight_rate": 5.0}

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
    assert len(made) == 6
    _, none, first = run(stop=5, state_file=path)
    assert none is None
    resumed, report, rest = run(state_file=path)
    assert first + rest == made
    assert report.to_dict() == expected.to_dict()
    theirs = dict(whole.named_parameters())
    assert all(p.equal(theirs[name]) for name, p in resumed.named_parameters())


@pytest.mark.parametrize(
    ("length", "held_out", "closed"),
    [(24, 8, 24), (128, 8, 24), (256, 8, 12), (300, 7, 11), (512, 4, 6), (1024, 2, 3), (8192, 2, 2)],
)
def test_long_windows_need_not_be_many(length, held_out, closed):
    assert number_of_windows(None, HELD_OUT, length) == held_out
    assert number_of_windows(None, CLOSED_WINDOWS, length) == closed
    assert number_of_windows(5, HELD_OUT, length) == 5
