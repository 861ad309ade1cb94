"""No option is ignored: each one changes what comes out, or is refused. An option without a row here fails.

A row of a recipe's table says what to change, and what that does: `numbers` (the results differ, and so does what the run
says it is of), `refused` (with these words), or a function of its own for what changes no number.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from situations import patched_model

from hf_posenc import Matching, cli
from hf_posenc.checkpoints import hub
from hf_posenc.command_arguments import meanings

SAME: dict = {}
"""Results of a recipe's plain runs, by recipe and arguments; their numbers do not depend on the folder."""


def module_of(recipe):
    """The recipe of this name."""
    return importlib.import_module(f"hf_posenc.recipes.{recipe}")


@dataclasses.dataclass
class Run:
    """One recipe with one folder of checkpoints and text."""

    recipe: str
    folder: object
    text: object
    patch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture

    def module(self):
        """The recipe."""
        return module_of(self.recipe)

    def words(self, changes):
        """The command line of its tiny run, with changes; None drops an option."""
        values = {
            "data": self.text,
            "separator": r"\f",
            "eval_tokens": 200,
            "lengths": "32 48",
            "retrieval_trials": 1,
            "train_length": 48,
            "steps": 4,
            "batch_size": 2,
            "gradient_accumulation": 1,
            "learning_rate": 1e-2,
            "warmup_steps": 0,
            "calibrate": "none",
            "output": self.folder / "out",
            **EXTRA[self.recipe](self.folder),
        }
        known = {field.name for field in dataclasses.fields(self.module().Arguments)}
        values = {name: value for name, value in values.items() if name in known} | changes
        return [
            word
            for name, value in values.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", *(str(value).split(" ") if name in SEVERAL else [str(value)]))
            if word != "True"
        ]

    def __call__(self, changes):
        """Its numbers, and what it says it is of; in a folder that is empty before."""
        output = self.folder / f"out-{len(list(self.folder.glob('out-*')))}"
        where = {"output": output}
        if self.recipe == "evaluate":
            where = {"json": output / "a.json"}
        elif self.recipe == "calibrate":
            where = {"output": output, "json": self.folder / f"{output.name}.json"}
        found = self.module().main(self.words({**where, **changes}))
        if self.recipe == "calibrate":
            assert json.loads((self.folder / f"{output.name}.json").read_text()) == found
            tensors = sorted(load_file(output / "model.safetensors").items())  # its header says which save it is of
            return found, hashlib.sha256(
                b"".join(each.view(-1).view(torch.uint8).numpy().tobytes() for _, each in tensors)
            ).hexdigest()
        paths = sorted(output.rglob("results.json")) if self.recipe != "evaluate" else [output / "a.json"]
        results = [json.loads(path.read_text()) for path in paths]
        keys = (
            "before",
            "retrieval_before",
            "after",
            "retrieval_after",
            "measured",
            "retrieval",
            "repeat_gain",
            "long_perplexity",
        )
        numbers = [
            [
                [each.get(key) for key in keys],
                [each.get("training", {}).get(key) for key in ("loss", "curve", "tokens")],
            ]
            for each in results
        ]
        return json.loads(json.dumps(numbers)), [each.get("identity") for each in results]

    def plain(self, changes):
        """The same of a run that is made once for all tests."""
        key = (self.recipe, json.dumps(changes, default=str))
        if key not in SAME:
            SAME[key] = self(changes)
        return SAME[key]


CALIBRATE = {"length": 16, "windows": 12, "held_out": 2, "steps": 2}
SEVERAL = ("step_lengths", "lengths", "find_learning_rate", "scheme_args", "schemes", "variants", "seeds", "data")
SEVERAL += ("fit_temperature", "repeat_gain")
POSE = {"positions": "pose", "position_length": 64}
FITTED = '["rope",{"scheme":"temperature","kind":"scalable"}]'
EXTRA = {
    "extend_context": lambda folder: {"model": folder / "llama", "scheme": "shaw"},
    "compare_schemes": lambda folder: {"model": folder / "llama", "variants": "shaw", "seeds": "0"},
    "pretrain": lambda folder: {"schemes": "shaw", "seeds": "0", "layers": 1, "width": 16, "heads": 2},
    "evaluate": lambda folder: {"model": folder / "llama"},
    "calibrate": lambda folder: {"model": folder / "llama", "scheme": "shaw", **CALIBRATE},
}


def numbers(beside=None, **changes):
    """The results differ from those without, and a run says that it is of something else."""

    def check(run):
        change = {name: value(run) if callable(value) else value for name, value in changes.items()}
        (before, was), (after, now) = run.plain(beside or {}), run({**(beside or {}), **change})
        assert before != after
        assert was != now or run.recipe == "evaluate"

    return check


def refused(message, **changes):
    """The recipe ends with status 2 and says why."""

    def check(run):
        with pytest.raises(SystemExit) as stop:
            run(changes)
        assert stop.value.code == 2
        assert message in " ".join(run.capsys.readouterr().err.split())

    return check


def free(look, beside=None, **changes):
    """Something else differs, which `look` finds; the numbers are the same, and so is what the run is of."""

    def check(run):
        before, was = run.plain(beside or {})
        seen = look(run)
        assert run({**(beside or {}), **changes}) == (before, was)
        assert seen()

    return check


def called(where, name, wanted):
    """Whether a function is called as wanted: `where` gives its owner, `wanted` judges the arguments of one call."""

    def look(run):
        owner, calls = where(run), []
        original = getattr(owner, name)

        def call(*arguments, **keywords):
            calls.append(wanted(*arguments, **keywords))
            return original(*arguments, **keywords)

        run.patch.setattr(owner, name, call)
        return lambda: any(calls)

    return look


def steps_of_calibration(run):
    """The second stage takes so many steps, whichever stage the judge keeps."""
    beside = {"calibrate": "attention", "calibrate_steps": 2}
    (_, was), module = run.plain(beside), importlib.import_module("hf_posenc.calibration.calibrate")
    taken = called(lambda _: module, "match", lambda _, __, matching, *___: matching.steps == 3)(run)
    _, now = run({**beside, "calibrate_steps": 3})
    assert was != now
    assert taken()


def other_text(run):
    """Another file."""
    path = run.folder / "other.txt"
    path.write_text(run.text.read_text().replace("e", "o"))
    return path


def from_the_hub(**changes):
    """The option reaches the Hub's loader, and what it gives is what is read."""

    def check(run):
        import datasets

        calls = []

        def load(name, config=None, *, split, streaming):
            calls.append((name, config, split))
            return [{"text": part, "story": part[::-1]} for part in run.text.read_text().split("\f")]

        run.patch.setattr(datasets, "load_dataset", load)
        plain, changed = run({"data": "me/set"}), run({"data": "me/set", **changes})
        assert calls[0] != calls[-1] or plain != changed

    return check


def checkpointing(run):
    """Activations are computed again, which changes no number; it counts as if it did."""
    from transformers import PreTrainedModel

    seen = called(lambda _: PreTrainedModel, "gradient_checkpointing_enable", lambda *_, **__: True)(run)
    assert run({"gradient_checkpointing": True})[0] == run.plain({})[0]
    assert seen()


def output(run):
    """It is written there."""
    run({})
    assert (run.folder / "out-0").exists()


def overwrite(run):
    """A folder that is not empty is refused without it."""
    (run.folder / "out-0").mkdir()
    (run.folder / "out-0" / "thesis.tex").touch()
    with pytest.raises(SystemExit):
        run({"output": run.folder / "out-0"})
    assert run({"output": run.folder / "out-0", "overwrite": True})


def pushed(**keywords):
    """The checkpoint is handed to the Hub's client."""

    def check(run):
        import hf_posenc

        calls = []

        def push(folder, repository, *, private):
            calls.append((repository, private))
            return SimpleNamespace(commit_url="url")

        run.patch.setattr(hf_posenc.checkpoints.hub, "push", push)
        assert run({"push_to": "me/x", **keywords}) == run.plain({})
        assert calls == [("me/x", True if "private" in keywords else None)]

    return check


def kept_weights(run):
    """The checkpoint is there, and otherwise is not."""
    for keywords, expected in (({}, False), ({"keep_weights": True}, True)):
        place = run.folder / f"kept-{expected}"
        run({"output": place, **keywords})
        assert any(place.rglob("*.safetensors")) is expected


def drawn(run):
    """There is a picture."""
    pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")
    run({"plot": run.folder / "a.png"})
    assert (run.folder / "a.png").stat().st_size > 1000


def lists(name, one, two):
    """A sweep makes each of its runs."""

    def check(run):
        assert len(run({name: one})[0]) == 1
        assert len(run({name: two})[0]) == 2

    return check


def other_tokenizer(run):
    """One that ends no document."""
    tokenizer = importlib.import_module("hf_posenc.recipes.embedded").byte_tokenizer()
    tokenizer.eos_token = tokenizer.bos_token = None
    tokenizer.save_pretrained(run.folder / "tokenizer")
    return run.folder / "tokenizer"


REVISION = refused("--revision needs a checkpoint on the Hub", revision="main")
STORY = {"data_name": from_the_hub(data_name="en"), "data_split": from_the_hub(data_split="test")}
TEXT = {
    **STORY,
    "data": numbers(data=other_text),
    "text_column": from_the_hub(text_column="story"),
    "separator": numbers(separator=" "),
    "streaming": numbers(streaming=True),
    "workers": free(
        called(
            lambda _: importlib.import_module("datasets").Dataset, "map", lambda *_, num_proc=None, **__: num_proc == 1
        ),
        workers=1,
    ),
}
# Streaming reads less of the text, and of that the same; tokens are then made one document at a time.
STREAMED = free(
    called(lambda _: importlib.import_module("hf_posenc.recipes.corpus"), "encode", lambda _, texts: len(texts) == 1),
    streaming=True,
)
MEASURING = {
    "packing": numbers(packing="documents"),
    "eval_tokens": numbers(eval_tokens=300),
    "lengths": numbers(lengths="32 40"),
    "stride": numbers(stride=8),
    "retrieval_trials": numbers(retrieval_trials=2),
}
TRAINING = {
    "train_length": numbers(train_length=40),
    "steps": numbers(steps=3),
    "batch_size": numbers(batch_size=1),
    "gradient_accumulation": numbers(gradient_accumulation=2),
    "learning_rate": numbers(learning_rate=1e-3),
    "schedule": numbers(schedule="linear"),
    "warmup_steps": numbers(warmup_steps=2),
    "weight_decay": numbers(weight_decay=5),
    "max_grad_norm": numbers(max_grad_norm=0.01),
    "mixed_precision": numbers(mixed_precision="bf16"),
    "gradient_checkpointing": checkpointing,
    "context_parallel": refused("--context-parallel 2 does not divide the 1 processes", context_parallel=2),
    "eval_every": numbers(eval_every=2),
    "save_every": free(
        called(
            lambda run: importlib.import_module("hf_posenc.recipes.training"),
            "save_state",
            lambda _, __, step: step == 2,
        ),
        save_every=2,
    ),
    "tracker": free(
        called(lambda _: importlib.import_module("accelerate").Accelerator, "init_trackers", lambda *_: True),
        tracker="tensorboard",
    ),
    "split_seed": numbers(split_seed=1),
    "positions": numbers(positions="randomised", position_length=64),
    "position_length": numbers(POSE, position_length=80),
    "pose_chunks": numbers(POSE, pose_chunks=3),
    "objective": numbers(objective="longce"),
    "longce_context": numbers({"objective": "longce"}, longce_context=12),
    "longce_limit": numbers({"objective": "longce"}, longce_limit=0.5),
}
CALIBRATION = {
    "calibrate": numbers(calibrate="closed_form"),
    "calibrate_steps": steps_of_calibration,
    "calibrate_windows": numbers({"calibrate": "attention", "calibrate_steps": 2}, calibrate_windows=20),
    "calibrate_length": numbers(
        {"calibrate": "attention", "calibrate_steps": 2, "calibrate_windows": 20}, calibrate_length=12
    ),
}
SHARED = {
    **TEXT,
    **MEASURING,
    **CALIBRATION,
    **TRAINING,
    "find_learning_rate": numbers({"learning_rate": None}, find_learning_rate="1e-2 1e-1"),
    "recovery_steps": numbers(recovery_steps=3),
    "recovery_length": numbers({"recovery_steps": 2}, recovery_length=16),
    "model": numbers(model=lambda run: run.folder / "gpt2"),
    "revision": REVISION,
    "lora_rank": numbers(lora_rank=2),
    "output": output,
}
ROWS = {
    "extend_context": {
        **SHARED,
        "distill": numbers(distill=1),
        "scheme": numbers(scheme="alibi"),
        "scheme_args": numbers(scheme_args="max_distance=4"),
        "seed": numbers(seed=1),
        "overwrite": overwrite,
        "resume": refused("there is no interrupted run in", resume=True),
        "push_to": pushed(),
        "private": pushed(private=True),
        "train_base": refused("--train-base trains the embedded base, and the base is --model", train_base=True),
        "base_steps": refused("--base-steps has no effect without --train-base", base_steps=3),
        "fit_temperature": numbers({"scheme": FITTED}, fit_temperature="24"),
        "base_seed": refused("--base-seed has no effect without --train-base", base_seed=3),
    },
    "compare_schemes": {
        **SHARED,
        "distill": numbers({"variants": "shaw+distill"}, distill=2),
        "variants": lists("variants", "shaw", "shaw alibi"),
        "seeds": lists("seeds", "0", "0 1"),
        "keep_weights": kept_weights,
    },
    "pretrain": {
        **TEXT,
        **MEASURING,
        **TRAINING,
        "schemes": lists("schemes", "shaw", "shaw alibi"),
        "seeds": lists("seeds", "0", "0 1"),
        "scheme_args": numbers(scheme_args="max_distance=4"),
        "tokenizer": numbers(tokenizer=other_tokenizer),
        "layers": numbers(layers=2),
        "width": numbers(width=32),
        "heads": numbers(heads=1),
        "keep_weights": kept_weights,
        "output": output,
    },
    "evaluate": {
        **{name: row for name, row in TEXT.items() if name != "streaming"},
        "streaming": STREAMED,
        **MEASURING,
        "packing": numbers({"eval_tokens": 700}, packing="documents"),
        "model": numbers(model=lambda run: run.folder / "gpt2"),
        "adapter": refused("--adapter nowhere", adapter="nowhere"),
        "dtype": numbers(dtype="bfloat16"),
        "device": refused("--device toaster cannot be used here", device="toaster"),
        "revision": REVISION,
        "memory": numbers(memory=8),
        "repeat_gain": numbers({"eval_tokens": 700}, repeat_gain="64 80"),
        "long_perplexity": numbers(long_perplexity=lambda run: run.folder / "llama"),
        "judge_length": refused("--judge-length has no effect without --long-perplexity", judge_length=16),
        "json": output,
    },
    "calibrate": {
        **TEXT,
        "streaming": STREAMED,
        "model": numbers(model=lambda run: run.folder / "gpt2"),
        "revision": REVISION,
        "device": refused("--device toaster cannot be used here", device="toaster"),
        "dtype": numbers(dtype="bfloat16"),
        "scheme": numbers(scheme="cope"),
        "scheme_args": numbers(scheme_args="max_distance=3"),
        "length": numbers(length=8),
        "windows": numbers(windows=11),
        "held_out": numbers(held_out=3),
        "stage": numbers({"steps": None}, stage="closed_form"),
        "weights": numbers(weights="scheme"),
        "steps": numbers(steps=3),
        "rate": numbers(rate=0.5),
        "weight_rate": numbers(weight_rate=0.5),
        "judge": refused("--judge must be one of loss, attention", judge="me"),
        "loss": numbers(loss="attention"),
        "step_lengths": numbers(step_lengths="4 8"),
        "seed": numbers(seed=5),
        "resume": refused("--resume: there is no", resume=True),
        "json": output,
        "plot": drawn,
        "output": output,
    },
}
SLOW = ("compare_schemes", "pretrain")  # a run for each option, as for extend_context.py


def rows_of_options():
    """Return all rows; slow are those of two recipes, and those that a recipe before has too: one row, one check."""
    seen, found = set(), []
    for recipe, rows in ROWS.items():
        for name, row in rows.items():
            slow = recipe in SLOW or id(row) in seen
            found.append(pytest.param(recipe, name, marks=[pytest.mark.slow] if slow else [], id=f"{recipe}-{name}"))
            seen.add(id(row))
    return found


@pytest.fixture
def run(request, recipes, tiny_checkpoints, text, monkeypatch, capsys):
    from accelerate.state import AcceleratorState

    def fresh(**_):
        AcceleratorState._reset_state(reset_partial_state=True)

    for name in ("calibrate", "candidates"):  # random weights predict nothing that could judge a calibration
        monkeypatch.setattr(importlib.import_module(f"hf_posenc.calibration.{name}"), "NOISE", math.inf)
    made = Run(request.param, tiny_checkpoints, text, monkeypatch, capsys)
    main = made.module().main
    monkeypatch.setattr(made.module(), "main", lambda words: (fresh(), main(words))[1])
    return made


@pytest.mark.rows(default=2, slow=90)
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(("run", "name"), rows_of_options(), indirect=["run"])
def test_an_option_of_a_recipe_does_something(run, name):
    ROWS[run.recipe][name](run)


@pytest.mark.parametrize("recipe", ROWS)
def test_every_option_of_a_recipe_has_a_row(recipes, recipe):
    assert {field.name for field in dataclasses.fields(module_of(recipe).Arguments)} == set(ROWS[recipe])


def test_every_recipe_has_rows(recipes):
    """Those that read arguments by name; harness/run.py and the command are below."""
    programs = [*recipes.glob("*.py"), *(recipes.parent / "hf_posenc" / "recipes").glob("*.py")]
    found = {path.stem for path in programs if "parse(Arguments, argv" in path.read_text()}
    assert found == set(ROWS)


@pytest.mark.parametrize("recipe", ROWS)
def test_a_file_says_all_that_the_command_line_says(recipes, recipe, tmp_path):
    """Every option as a key of a YAML file, and a key that is none of them is refused."""
    import yaml

    options = importlib.import_module("hf_posenc.recipes.options")
    arguments = module_of(recipe).Arguments
    parser, kinds = options.parser_of(arguments, "test"), options.values_of_options(arguments)
    values = {}
    for action in parser._actions:
        if action.dest not in ("help", "help_all", "config"):
            value = True if action.const is True else {int: 17, float: 0.7}.get(action.type, "word")
            value = (*(each for each in kinds[action.dest].choices if each != action.default), value)[0]
            values[action.dest] = [value, value] if action.nargs in ("+", "*") else value
    assert set(values) == {field.name for field in dataclasses.fields(arguments)}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    words = [
        str(word)
        for name, value in values.items()
        for word in (options.option(name), *(value if isinstance(value, list) else [value]))
    ]
    read, _ = options.parse(arguments, ["--config", str(file)], "test")
    said, _ = options.parse(arguments, words, "test")
    assert read == said
    assert all(getattr(read, field.name) != default_of(field) for field in dataclasses.fields(arguments))
    file.write_text("nonsense: 3\n")
    with pytest.raises(SystemExit):
        options.parse(arguments, ["--config", str(file)], "test")


def test_an_option_of_several_recipes_is_one_option(recipes):
    """Of one type, with one help text; defaults differ. What `--output` names differs too: a run, a sweep, a file."""
    declared = {}
    for recipe in ROWS:
        arguments = module_of(recipe).Arguments
        said = meanings(arguments)
        for field in dataclasses.fields(arguments):
            if field.name != "output":
                declared.setdefault(field.name, set()).add((field.type, said[field.name]))
    assert {name: said for name, said in declared.items() if len(said) > 1} == {}


@pytest.mark.parametrize("recipe", ROWS)
def test_numbers_in_a_help_text_are_those_of_the_code(recipes, recipe):
    """Help is written in docstrings, which cannot name a constant."""
    calibrating, rates = (
        importlib.import_module(f"hf_posenc.recipes.{name}") for name in ("calibration_stage", "learning_rate_search")
    )
    said = meanings(module_of(recipe).Arguments)
    for name, number in (
        ("calibrate_steps", f"on batches of {Matching.batch_size} windows"),
        ("calibrate_windows", f"{calibrating.HELD_OUT[0]} held-out windows"),
        ("calibrate_length", f"{calibrating.MAX_DEFAULT_LENGTH} at most"),
        ("find_learning_rate", f"for {rates.TRIAL_STEPS} steps"),
        ("length", f"{module_of('calibrate').DEFAULT_LENGTH} at most"),
    ):
        assert number in said.get(name, number), name


def default_of(field):
    """Of a dataclass."""
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


# ------------------------------------------------------------------------------------------------- other command lines

COMMANDS = {
    ("schemes",): (),
    ("families",): (),
    ("inspect",): ("STOCK",),
    ("verify",): ("OURS",),
    ("check",): ("OURS",),
    ("patch",): ("STOCK", "shaw", "OUT/patched"),
    ("export",): ("BARE", "OUT/stock"),
    ("plot",): ("decay", "OUT/a.png", "rope"),
    ("push",): ("OURS", "me/x"),
    ("completion",): ("bash",),
}
# With the option, and where another call is needed to show it, that call without.
OPTIONS = {
    ("schemes", "names"): ("alibi",),
    ("families", "model_types"): ("llama",),
    ("inspect", "checkpoint"): ("OURS",),
    ("inspect", "revision"): ("STOCK", "--revision", "main"),
    ("verify", "checkpoint"): ("STOCK",),
    ("verify", "revision"): ("OURS", "--revision", "main"),
    ("verify", "dtype"): ("OURS", "--dtype", "bfloat16"),
    ("check", "checkpoint"): ("STOCK",),
    ("check", "other"): ("OURS", "--other", "OURS"),
    ("check", "json"): ("OURS", "--json", "OUT/found.json"),
    ("check", "seed"): ("OURS", "--seed", "5"),
    ("check", "trust_remote_code"): (("OWN",), ("OWN", "--trust-remote-code")),
    ("check", "revision"): ("OURS", "--revision", "main"),
    ("check", "dtype"): ("OURS", "--dtype", "bfloat16"),
    ("patch", "checkpoint"): ("OTHER", "shaw", "OUT/patched"),
    ("patch", "scheme"): ("STOCK", "alibi", "OUT/patched"),
    ("patch", "output"): ("STOCK", "shaw", "OUT/elsewhere"),
    ("patch", "seed"): ("STOCK", "shaw", "OUT/patched", "--seed", "5"),
    ("patch", "scheme_args"): ("STOCK", "shaw", "OUT/patched", "--scheme-args", "max_distance=3"),
    ("patch", "revision"): ("STOCK", "shaw", "OUT/patched", "--revision", "main"),
    ("patch", "dtype"): ("STOCK", "shaw", "OUT/patched", "--dtype", "bfloat16"),
    ("export", "checkpoint"): ("OURS", "OUT/stock"),
    ("export", "output"): ("BARE", "OUT/elsewhere"),
    ("export", "format"): ("BARE", "OUT/stock", "--format", "gguf"),
    ("export", "dtype"): (("BARE", "OUT/a.gguf"), ("BARE", "OUT/a.gguf", "--dtype", "float16")),
    ("export", "revision"): ("BARE", "OUT/stock", "--revision", "main"),
    ("plot", "kind"): ("wavelengths", "OUT/a.png", "rope"),
    ("plot", "output"): ("decay", "OUT/a.svg", "rope"),
    ("plot", "sources"): ("decay", "OUT/a.png", "alibi"),
    ("plot", "length"): ("decay", "OUT/a.png", "rope", "--length", "32"),
    ("plot", "trained_length"): (
        ("wavelengths", "OUT/a.png", "rope"),
        ("wavelengths", "OUT/a.png", "rope", "--trained-length", "32"),
    ),
    ("plot", "data"): ("decay", "OUT/a.png", "rope", "--data", "TEXT"),
    ("plot", "revision"): ("decay", "OUT/a.png", "rope", "--revision", "main"),
    ("plot", "dtype"): (
        ("order", "OUT/a.png", "OTHER", "--length", "9", "--json", "OUT/a.json"),
        ("order", "OUT/a.png", "OTHER", "--length", "9", "--json", "OUT/a.json", "--dtype", "bfloat16"),
    ),
    ("plot", "positions"): (
        ("expansion", "OUT/a.png", "OTHER", "--length", "9"),
        ("expansion", "OUT/a.png", "OTHER", "--length", "9", "--positions", "1", "4"),
    ),
    ("plot", "title"): ("decay", "OUT/a.png", "rope", "--title", "other"),
    ("plot", "json"): ("decay", "OUT/a.png", "rope", "--json", "OUT/a.json"),
    ("plot", "scheme_args"): ("decay", "OUT/a.png", "rope", "--scheme-args", "rope_theta=100.0"),
    ("push", "directory"): ("STOCK", "me/x"),
    ("push", "repo_id"): ("OURS", "me/y"),
    ("push", "dry_run"): ("OURS", "me/x", "--dry-run"),
    ("push", "private"): ("OURS", "me/x", "--private"),
    ("push", "revision"): ("OURS", "me/x", "--revision", "trial"),
    ("push", "token"): ("OURS", "me/x", "--token", "secret"),
    ("push", "message"): ("OURS", "me/x", "--message", "hello"),
    ("completion", "shell"): ("zsh",),
}


def actions_of(parser):
    """What it reads, but for help and version."""
    return [a for a in parser._actions if not isinstance(a, (argparse._HelpAction, argparse._VersionAction))]


def test_every_option_of_the_command_has_a_row():
    (commands,) = actions_of(cli._parser())
    assert {(name,) for name in commands.choices} == set(COMMANDS) | {(name,) for name in cli.RECIPES}
    assert {recipe for recipe, _ in cli.RECIPES.values()} <= set(ROWS)
    found = {(name, action.dest) for name, parser in commands.choices.items() for action in actions_of(parser)}
    assert found == set(OPTIONS)


@pytest.fixture
def places(tmp_path, tiny_checkpoints, monkeypatch):
    """What the capitals stand for; pushing only says what it would."""
    patched = patched_model("shaw", "llama")
    patched.save_pretrained(tmp_path / "ours")
    patched_model("nope", "llama").save_pretrained(tmp_path / "bare")
    (tmp_path / "text.txt").write_text(
        "Call me Ishmael. Some years ago, never mind how long precisely, I thought I would"
    )

    def push(folder, repository, **keywords):
        print(
            json.loads((folder / "config.json").read_text())["model_type"],
            repository,
            sorted(keywords.items(), key=str),
        )
        return SimpleNamespace(commit_url="url")

    monkeypatch.setattr(hub, "push", push)
    own = shutil.copytree(tiny_checkpoints / "llama", tmp_path / "own")
    (own / "own.py").write_text("from transformers import LlamaForCausalLM\n\nclass Own(LlamaForCausalLM):\n    pass\n")
    config = json.loads((own / "config.json").read_text()) | {"auto_map": {"AutoModelForCausalLM": "own.Own"}}
    (own / "config.json").write_text(json.dumps(config))
    return {
        "OWN": own,
        "STOCK": tiny_checkpoints / "llama",
        "OTHER": tiny_checkpoints / "gpt2",
        "OURS": tmp_path / "ours",
        "BARE": tmp_path / "bare",
        "TEXT": tmp_path / "text.txt",
        "MORE": tiny_checkpoints / "llama" / "config.json",
    }


@pytest.mark.rows(default=2)
@pytest.mark.parametrize("option", OPTIONS, ids="-".join)
def test_an_option_of_the_command_does_something(option, places, tmp_path, capsys):
    """Status, what is printed and what is written are not what they are without."""
    if "plot" in option:
        pytest.importorskip("matplotlib", reason="pip install matplotlib runs this")
    if option in (("export", "format"), ("export", "dtype")):
        pytest.importorskip("gguf", reason="pip install gguf runs this")
    if "completion" in option:
        pytest.importorskip("shtab", reason="pip install shtab runs this")
    calls = OPTIONS[option] if isinstance(OPTIONS[option][0], tuple) else (COMMANDS[option[:1]], OPTIONS[option])
    outcomes = []
    for number, call in enumerate(calls):
        out = tmp_path / f"out-{number}"
        out.mkdir()
        names = {**places, "OUT": out}
        words = [str(names[word]) if word in names else word.replace("OUT/", f"{out}/") for word in call]
        torch.manual_seed(0)
        status = cli.main([option[0], *words])
        written = {
            str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(out.rglob("*"))
            if path.is_file()
        }
        printed = [stream.replace(str(out), "OUT") for stream in capsys.readouterr()]
        outcomes.append((status, [line for line in printed[0].splitlines() if "s/it" not in line], written))
    assert outcomes[0][0] == 0
    assert outcomes[0] != outcomes[1]


def test_every_option_of_the_harness_does_something(recipes, tiny_checkpoints, monkeypatch, capsys):
    """With the harness itself replaced by one that says what it was handed."""
    monkeypatch.syspath_prepend(str(recipes / "harness"))
    harness = importlib.import_module("run")
    calls = []

    def evaluate(model, tasks, bootstrap_iters, metadata):
        calls.append((*model, json.dumps(tasks, default=str)))
        return {"results": {}}

    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=evaluate))
    monkeypatch.setattr(
        harness, "harness_model", lambda model, _, max_length: (type(model).__name__, str(model.device), max_length)
    )
    seen = []
    monkeypatch.setattr(
        argparse.ArgumentParser,
        "parse_args",
        lambda self, argv, parse=argparse.ArgumentParser.parse_args: (
            seen.append({action.dest for action in actions_of(self)}),
            parse(self, argv),
        )[1],
    )
    rows = {
        "checkpoint": [str(tiny_checkpoints / "gpt2")],
        "tasks": [str(tiny_checkpoints / "llama"), "--tasks", "other"],
        "max_length": [str(tiny_checkpoints / "llama"), "--max-length", "16"],
        "device": [str(tiny_checkpoints / "llama"), "--device", "meta"],
    }
    harness.main([str(tiny_checkpoints / "llama")])
    assert seen[0] == set(rows)
    for words in rows.values():
        harness.main(words)
    assert len(set(calls)) == 1 + len(rows)
