"""A raw accelerate loop, as short as it gets: patch, train, save. Started by test_distributed.py in every way there is.

python tests/helpers/training_script.py OUTPUT FAMILY SCHEME CONTEXT        CONTEXT: processes that share a sequence
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from families import tiny, tokens
from torch.utils.data import DataLoader, DistributedSampler

from hf_posenc import context_group, context_parallel, patch_model, shard_sequence, verify

output, family, scheme, context = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
accelerator = Accelerator()
model = patch_model(tiny(family), scheme, seed=0)
assert verify(model)
model.train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
data = [row for step in range(3) for row in tokens(4, 20, seed=step)]
batch_size = 4 * context // accelerator.num_processes
if accelerator.distributed_type == "DEEPSPEED":
    accelerator.state.deepspeed_plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": batch_size,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
losses = []
if context > 1:
    group, data_rank, data_size = context_group(context)
    sampler = DistributedSampler(data, num_replicas=data_size, rank=data_rank, shuffle=False)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)  # not prepared: accelerate would split it further
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    loader = DataLoader(data, batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def step(loss):
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(accelerator.reduce(loss.detach(), "mean").item())


for batch in loader:
    if context > 1:
        with context_parallel(model, group):
            batch = batch.to(accelerator.device)
            step(model(**shard_sequence({"input_ids": batch, "labels": batch}, group)).loss * context)
    else:
        step(model(input_ids=batch, labels=batch, use_cache=False).loss)

state = accelerator.get_state_dict(model)  # on every process
if accelerator.is_main_process:
    accelerator.unwrap_model(model).save_pretrained(output / "model", state_dict=state)
    kind = f"{accelerator.distributed_type.value} {accelerator.num_processes}"
    (output / "losses.json").write_text(json.dumps({"kind": kind, "losses": losses}))
accelerator.wait_for_everyone()
if dist.is_initialized():
    dist.destroy_process_group()
    os._exit(0)  # threads of the backend may outlive the group, and be aborted with the interpreter
