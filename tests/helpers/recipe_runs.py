"""Runs of the fine-tuning recipe as its users start it, and what must not depend on how a run went."""

import importlib
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


def options(folder, text, output, **changes):
    """Command line of a run of a second."""
    values = {
        "model": folder / "llama",
        "data": text,
        "separator": r"\f",
        "output": output,
        "lengths": "16 32 48",
        "eval_tokens": 200,
        "train_length": 48,
        "batch_size": 1,
        "gradient_accumulation": 2,
        "steps": 6,
        "recovery_steps": 2,
        "trials": 0,
        "calibrate": "none",
    } | changes
    return [
        w
        for key, value in values.items()
        if value is not None
        for w in (f"--{key.replace('_', '-')}", *str(value).split(" "))
        if w
    ]


def in_process(recipes, words, processes=None, launch_file=None, **extra):
    """The recipe as its users start it."""
    launch = [*LAUNCH, str(processes)] if processes else [sys.executable]
    if launch_file:  # what `accelerate launch --config_file` does on GPUs
        file = recipes / "accelerate" / f"{launch_file}.yaml"
        launch += [str(recipes.parent / "tests/helpers/launch_on_cpu.py"), str(file)]
    else:
        launch.append("-m")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(recipes.parent),
        "HF_DATASETS_CACHE": importlib.import_module("datasets").config.HF_DATASETS_CACHE,
    }
    return subprocess.Popen(
        [*launch, "hf_posenc.recipes.extend_context", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **extra,
    )


def weights(output):
    return load_file(output / "model" / "model.safetensors")


def metrics(results):
    """What must not depend on how a run went."""
    return {key: results[key] for key in ("before", "after")} | {
        key: results["training"][key] for key in ("loss", "curve", "tokens")
    }


def assert_same_weights(a, b, tolerance=0.0):
    first, second = weights(a), weights(b)
    assert first.keys() == second.keys()
    for name in first:
        assert (first[name] - second[name]).abs().max() <= tolerance, name


class Stop(Exception):
    pass


def stopped_at(step, monkeypatch, main, words, act=None):
    """Run a recipe that is stopped before a step, or acts there and goes on."""
    training = importlib.import_module("hf_posenc.recipes.training")
    one_step = training.one_step

    def stopping(*given):
        if given[4] == step:
            if act is None:
                raise Stop
            act()
        return one_step(*given)

    with monkeypatch.context() as patch:
        patch.setattr(training, "one_step", stopping)
        if act is None:
            with pytest.raises(Stop):
                main(words)
        else:
            main(words)
