"""The recipes: extend a checkpoint's context, compare schemes, evaluate, calibrate. They are no API.

A recipe runs as `hf-posenc COMMAND` in one process, or as `accelerate launch -m hf_posenc.recipes.NAME` in many. The
recipes need the extra `recipes` of the package: `pip install '.[recipes]'` in a clone.
"""
