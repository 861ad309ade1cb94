"""The launch files of recipes/accelerate are read by accelerate itself, and say what they mean to say."""

import os
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

FOLDER = Path(__file__).parents[2] / "recipes" / "accelerate"
KINDS = {
    "one_gpu": DistributedType.NO,
    "ddp": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "deepspeed_zero2": DistributedType.DEEPSPEED,
    "deepspeed_zero3": DistributedType.DEEPSPEED,
    "context_parallel": DistributedType.FSDP,
    "multi_node": DistributedType.MULTI_GPU,
}


def launched(name, *more):
    """The arguments that `accelerate launch` works with."""
    command = ["--config_file", str(FOLDER / f"{name}.yaml"), *more, "script.py"]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    return arguments


@pytest.fixture
def environment(monkeypatch):
    """Takes over variables, undone after the test; those that are there already would be mistaken for the file's."""
    for name in list(os.environ):
        if name.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.delenv(name)
    return lambda values: [monkeypatch.setenv(name, value) for name, value in values.items()]


def test_every_file_is_known():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_reads_it(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))  # an unknown key at the top is an error
    assert config.distributed_type == KINDS[name]
    assert config.mixed_precision == "bf16"
    assert config.num_machines == (2 if name == "multi_node" else 1)


@pytest.mark.parametrize("name", KINDS)
def test_keys_inside_are_options_of_accelerate_launch(name):
    # accelerate itself would set any name.
    options = {action.dest for action in launch_command_parser()._actions}
    raw = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    inside = {key for value in raw.values() if isinstance(value, dict) for key in value}
    assert inside <= options
    assert bool(inside) == (KINDS[name] in (DistributedType.FSDP, DistributedType.DEEPSPEED))


@pytest.mark.parametrize("name", ["fsdp2", "context_parallel"])
def test_fsdp_is_version_2_with_the_whole_model_on_every_process(name, environment):
    arguments = launched(name)
    assert arguments.use_fsdp
    assert not arguments.use_parallelism_config  # cp_size would take the mask away
    environment(prepare_multi_gpu_env(arguments))
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.activation_checkpointing
    assert not plugin.cpu_ram_efficient_loading
    assert plugin.state_dict_type.name == "FULL_STATE_DICT"
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"


@pytest.mark.parametrize(("name", "stage"), [("deepspeed_zero2", "2"), ("deepspeed_zero3", "3")])
def test_deepspeed_gets_its_stage_and_clipping(name, stage):
    arguments = launched(name, "--num_processes", "2")
    assert arguments.use_deepspeed
    arguments.deepspeed_fields_from_accelerate_config = ""  # set where DeepSpeed is installed
    _, env = prepare_deepspeed_cmd_env(arguments)
    assert env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == stage
    assert env["ACCELERATE_GRADIENT_CLIPPING"] == "1.0"
    assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "1"
    assert env["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "false"
    assert env.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL") == ("true" if stage == "3" else None)
