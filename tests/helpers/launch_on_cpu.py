"""Runs a script, or a module, as `accelerate launch --config_file FILE` would, but on CPUs: FSDP2 and DeepSpeed included.

    torchrun --standalone --nproc_per_node 2 tests/helpers/launch_on_cpu.py recipes/accelerate/fsdp2.yaml SCRIPT_OR_MODULE ARGUMENTS

accelerate starts one process on a CPU whatever the file says, and shards on accelerators only. torchrun starts the
processes here, accelerate reads the file and makes the script's environment of it, and the distributed type, which is
what accelerate goes by, is relabelled before the script runs. Precision is that of the model.
"""

import os
import runpy
import sys
import warnings

import torch
from accelerate import PartialState
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env


def main() -> None:
    file, script, *rest = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    own = {name: os.environ[name] for name in os.environ if not name.startswith(("ACCELERATE_", "FSDP_"))}
    command = ["--config_file", file, "--mixed_precision", "no", "--num_processes", os.environ["WORLD_SIZE"], script]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(command))
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ""
        os.environ["DS_ACCELERATOR"] = own["DS_ACCELERATOR"] = "cpu"
        _, environment = prepare_deepspeed_cmd_env(arguments)
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        environment = prepare_multi_gpu_env(arguments)
    os.environ.clear()
    os.environ.update({**environment, **own})  # torchrun's addresses and ranks stay
    PartialState(cpu=True)
    if arguments.use_deepspeed or arguments.use_fsdp:
        label = DistributedType.DEEPSPEED if arguments.use_deepspeed else DistributedType.MULTI_XPU
        PartialState._shared_state["distributed_type"] = label
    sys.argv = [script, *rest]
    if not script.endswith(".py"):
        runpy.run_module(script, run_name="__main__")
        return
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
