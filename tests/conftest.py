"""What every test relies on: no network, two threads."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported, which reads it once

import torch

torch.set_num_threads(2)
