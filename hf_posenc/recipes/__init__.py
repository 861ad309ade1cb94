"""The recipes: extend a checkpoint's context, compare schemes, pretrain from scratch, evaluate; programs, not an API.

Each entry point runs as `hf-posenc COMMAND` in one process, or as `accelerate launch -m hf_posenc.recipes.NAME` in
many. They need what the extra `recipes` of the package installs: `pip install '.[recipes]'` in a clone.
"""
