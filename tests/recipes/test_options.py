"""No option is ignored: each one changes what comes out, or is refused. An option without a row here fails."""

import dataclasses
import hashlib
import importlib
import json
import math

import pytest
import torch
import yaml
from recipe_runs import options as words_of
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_posenc.core.command_arguments import option, parser_of

KEYS = ("before", "measures_before", "writes_before", "after", "measures_after", "measured", "measures", "writes")


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

    def __call__(self, **changes):
        """Its numbers, and what it says it is of; in a folder that is empty before."""
        arguments = module_of(self.recipe).Arguments
        known = {field.name for field in dataclasses.fields(arguments)}
        output = self.folder / f"out-{len(list(self.folder.glob('out-*')))}"
        values = {"lengths": "32 48", "trials": 1, "steps": 4, "batch_size": 2, "gradient_accumulation": 1}
        values |= {"learning_rate": 1e-2, "warmup_steps": 0, "recovery_steps": None, **EXTRA[self.recipe](self.folder)}
        values |= {"output": output} | ({"json": output / "a.json"} if self.recipe == "evaluate" else {})
        dropped = dict.fromkeys({"train_length", "calibrate", "eval_tokens", "model", *values} - known)
        words = words_of(self.folder, self.text, **{**values, **dropped, **changes})
        self.fresh()
        found = module_of(self.recipe).main(words)
        if self.recipe == "calibrate":
            tensors = sorted(load_file(output / "model.safetensors").items())  # its header says which save it is of
            data = b"".join(each.view(-1).view(torch.uint8).numpy().tobytes() for _, each in tensors)
            return found, hashlib.sha256(data).hexdigest()
        paths = [output / "a.json"] if self.recipe == "evaluate" else sorted(output.rglob("results.json"))
        results = [json.loads(path.read_text()) for path in paths]
        numbers = [
            [*map(each.get, KEYS), *(each.get("training", {}).get(key) for key in ("loss", "curve", "tokens"))]
            for each in results
        ]
        return numbers, [each.get("identity") for each in results]

    def fresh(self):
        """Accelerate begins anew."""
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)


EXTRA = {
    "extend_context": lambda folder: {"scheme": "shaw"},
    "compare_schemes": lambda folder: {"variants": "shaw", "seeds": "0"},
    "evaluate": lambda folder: {},
    "calibrate": lambda folder: {"scheme": "shaw", "length": 16, "windows": 12, "steps": 2},
}


def numbers(beside=None, **changes):
    """The results differ from those without, and a run says that it is of something else."""

    def check(run):
        change = {name: value(run) if callable(value) else value for name, value in changes.items()}
        (before, was), (after, now) = run(**(beside or {})), run(**{**(beside or {}), **change})
        assert before != after
        assert was != now or run.recipe == "evaluate"

    return check


def refused(message, **changes):
    """The recipe ends with status 2 and says why."""

    def check(run):
        with pytest.raises(SystemExit) as stop:
            run(**changes)
        assert stop.value.code == 2
        assert message in " ".join(run.capsys.readouterr().err.split())

    return check


def free(where, name, wanted, **changes):
    """The numbers are the same, and so is what the run is of; but a function was called as wanted."""

    def check(run):
        plain, owner, calls = run(), where(), []
        original = getattr(owner, name)

        def call(*arguments, **keywords):
            calls.append(wanted(*arguments, **keywords))
            return original(*arguments, **keywords)

        run.patch.setattr(owner, name, call)
        changed = run(**changes)
        assert changed[0] == plain[0]
        assert any(calls)

    return check


def from_the_hub(**changes):
    """The option reaches the Hub's loader, or what it gives is what is read."""

    def check(run):
        datasets, calls = importlib.import_module("datasets"), []

        def load(name, config=None, *, split, streaming):
            calls.append((name, config, split))
            parts = run.text.read_text().split("\f")
            return datasets.Dataset.from_list([{"text": part, "story": part[::-1]} for part in parts])

        run.patch.setattr(datasets, "load_dataset", load)
        plain, changed = run(data="me/set", separator=None), run(data="me/set", separator=None, **changes)
        assert calls[0] != calls[-1] or plain != changed

    return check


def changed_text(run):
    """Another file."""
    path = run.folder / "other.txt"
    path.write_text(run.text.read_text().replace("e", "o"))
    return path


def written(run):
    """It is written there."""
    run()
    assert (run.folder / "out-0").exists()


def dtype_of_weights(run):
    """Saved weights have the dtype of the base's, also where a LoRA adapter is merged into them."""
    half = {"model": run.folder / "half"}
    AutoModelForCausalLM.from_pretrained(run.folder / "llama").half().save_pretrained(half["model"])
    AutoTokenizer.from_pretrained(run.folder / "llama").save_pretrained(half["model"])
    cases = (
        ({}, "float32"),
        (half, "float16"),
        (half | {"lora_rank": 1}, "float16"),
    )
    for number, (changes, expected) in enumerate(cases):
        run(**changes)
        saved = load_file(run.folder / f"out-{number}" / "model/model.safetensors").values()
        assert {weight.dtype for weight in saved if weight.is_floating_point()} == {getattr(torch, expected)}


def kept_weights(run):
    """The checkpoint is there, and otherwise is not."""
    for number, expected in enumerate((False, True)):
        run(keep_weights=expected or None)
        assert any((run.folder / f"out-{number}").rglob("*.safetensors")) is expected


def lists(name, one, two):
    """A sweep makes each of its runs."""

    def check(run):
        assert len(run(**{name: one})[0]) == 1
        assert len(run(**{name: two})[0]) == 2

    return check


def steps_of_calibration(run):
    """The second stage takes so many steps, whichever stage the judge keeps."""
    (_, was), taken = run(**MATCHING), []
    module = importlib.import_module("hf_posenc.calibration.calibrate")

    def match(*words, plain=module.match, **more):
        taken.append(words[2].steps)
        return plain(*words, **more)

    run.patch.setattr(module, "match", match)
    assert run(**MATCHING | {"calibrate_steps": 3})[1] != was
    assert 3 in taken


MATCHING = {"calibrate": "matching", "calibrate_steps": 2}
TEXT = {
    "data_name": from_the_hub(data_name="en"),
    "data_split": from_the_hub(data_split="test"),
    "text_column": from_the_hub(text_column="story"),
    "data": numbers(data=changed_text),
    "separator": numbers(separator="e"),
    "streaming": numbers(streaming=True),
}
# Less of the text is read, and of that the same.
STREAMED = free(lambda: module_of("corpus"), "rows_of", lambda arguments, *_, **__: arguments.streaming, streaming=True)
MEASURING = {
    "packing": numbers({"eval_tokens": 700}, packing="documents"),
    "eval_tokens": numbers(eval_tokens=300),
    "lengths": numbers(lengths="32 40"),
    "measures": numbers(measures="induction_copy repeat_gain"),
    "trials": numbers(trials=2),
    "prompt": numbers(prompt="def"),
}
TRAINING = {
    "train_length": numbers(train_length=40),
    "steps": numbers(steps=3),
    "batch_size": numbers(batch_size=1),
    "gradient_accumulation": numbers(gradient_accumulation=2),
    "learning_rate": numbers(learning_rate=1e-3),
    "warmup_steps": numbers(warmup_steps=2),
    "mixed_precision": numbers(mixed_precision="bf16"),
    "gradient_checkpointing": free(
        lambda: PreTrainedModel, "gradient_checkpointing_enable", lambda *_, **__: True, gradient_checkpointing=True
    ),
    "context_parallel": refused("--context-parallel 2 does not divide the 1 processes", context_parallel=2),
    "eval_every": numbers(eval_every=2),
    "save_every": free(lambda: module_of("training"), "save_state", lambda _, __, step: step == 2, save_every=2),
    "tracker": free(
        lambda: importlib.import_module("accelerate").Accelerator,
        "init_trackers",
        lambda *_: True,
        tracker="tensorboard",
    ),
    "pose_length": numbers(pose_length=64),
}
OTHER_MODEL = numbers(model=lambda run: run.folder / "gpt2")
SHARED = {
    **TEXT,
    **MEASURING,
    **TRAINING,
    "calibrate": numbers(calibrate="closed_form"),
    "calibrate_steps": steps_of_calibration,
    "calibrate_windows": numbers(MATCHING, calibrate_windows=20),
    "calibrate_length": numbers(MATCHING, calibrate_length=12),
    "recovery_steps": numbers(recovery_steps=3),
    "model": OTHER_MODEL,
    "lora_rank": numbers(lora_rank=2),
    "distill": numbers(distill=1),
    "output": written,
}
ROWS = {
    "extend_context": {
        **SHARED,
        "scheme": numbers(scheme="alibi"),
        "scheme_args": numbers(scheme_args="max_distance=4"),
        "seed": numbers(seed=1),
        "resume": refused("there is no interrupted run in", resume="true"),
        "model": dtype_of_weights,
    },
    "compare_schemes": {
        "distill": numbers({"variants": "shaw+distill"}, distill=2),
        "variants": lists("variants", "shaw", "shaw alibi"),
        "seeds": lists("seeds", "0", "0 1"),
        "keep_weights": kept_weights,
    },
    "evaluate": {
        **TEXT,
        **MEASURING,
        "streaming": STREAMED,
        "model": OTHER_MODEL,
        "adapter": refused("--adapter nowhere", adapter="nowhere"),
        "dtype": numbers(dtype="bfloat16"),
        "json": written,
    },
    "calibrate": {
        **TEXT,
        "streaming": STREAMED,
        "model": OTHER_MODEL,
        "dtype": numbers(dtype="bfloat16"),
        "scheme": numbers(scheme="cope"),
        "scheme_args": numbers(scheme_args="max_distance=3"),
        "length": numbers(length=8),
        "windows": numbers(windows=11),
        "stage": numbers(stage="closed_form"),
        "steps": numbers(steps=3),
        "seed": numbers(seed=5),
        "resume": refused("--resume: there is no", resume="true"),
        "json": lambda run: [run(json=run.folder / "a.json"), json.loads((run.folder / "a.json").read_text())],
        "output": written,
    },
}
"""Recipe -> option -> what it does. `compare` shares options with `extend`, and has rows of its own here."""


def rows_of_options():
    """Return all rows; slow are those of sweeps, and those that a recipe before has too: one row, one check."""
    seen = set()
    for recipe, rows in ROWS.items():
        for name, row in rows.items():
            slow = recipe == "compare_schemes" or id(row) in seen
            seen.add(id(row))
            yield pytest.param(recipe, name, marks=[pytest.mark.slow] if slow else [], id=f"{recipe}-{name}")


@pytest.fixture
def run(request, recipes, tiny_checkpoints, text, monkeypatch, capsys):
    for name in ("calibrate", "candidates"):  # random weights predict nothing that could judge a calibration
        monkeypatch.setattr(importlib.import_module(f"hf_posenc.calibration.{name}"), "NOISE", math.inf)
    return Run(request.param, tiny_checkpoints, text, monkeypatch, capsys)


@pytest.mark.rows(default=2, slow=70)
@pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize(("run", "name"), list(rows_of_options()), indirect=["run"])
def test_an_option_of_a_recipe_does_something(run, name):
    ROWS[run.recipe][name](run)


MOST_OPTIONS = 40
"""Of one command. Who needs more writes Python: take an option out for each further one."""


@pytest.mark.parametrize("recipe", ROWS)
def test_every_option_of_a_recipe_has_a_row(recipes, recipe):
    shared = SHARED if recipe == "compare_schemes" else {}
    names = {field.name for field in dataclasses.fields(module_of(recipe).Arguments)}
    assert set(ROWS[recipe]) <= names <= set(ROWS[recipe]) | set(shared)
    assert len(names) <= MOST_OPTIONS


@pytest.mark.parametrize("recipe", ROWS)
def test_a_file_says_all_that_the_command_line_says(recipes, recipe, tmp_path):
    """Every option as a key of a YAML file, and a key that is none of them is refused."""
    options, arguments = module_of("options"), module_of(recipe).Arguments
    values = {}
    for action in parser_of(arguments, "test")._actions[1:]:
        number = {"int": 17, "float": 0.7}.get(getattr(action.type, "__name__", ""), "word")
        value = next((each for each in action.choices or () if each != action.default), action.const or number)
        values[action.dest] = [value, value] if action.nargs == "+" else value
    assert set(values) == {field.name for field in dataclasses.fields(arguments)}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    words = [
        str(word)
        for name, value in values.items()
        for word in (option(name), *(value if isinstance(value, list) else [value]))
    ]
    read, _ = options.parse(arguments, ["--config", str(file)], "test")
    assert read == options.parse(arguments, words, "test")[0]
    assert all(getattr(read, field.name) != field.default for field in dataclasses.fields(arguments))
    file.write_text("nonsense: 3\n")
    with pytest.raises(SystemExit):
        options.parse(arguments, ["--config", str(file)], "test")
