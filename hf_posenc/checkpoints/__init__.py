"""Checkpoints of patched models, which can never be loaded as something else by mistake.

A patched model has the model type `posenc_<base>`, and classes that are made on demand in front of the stock ones. Five
guards refuse a stock class. Each is for loaders that get past the guards before it:

- the model type, for Auto classes;
- a setting of a type that no stock config class accepts, for stock classes;
- an attention implementation that is registered nowhere, for stock configs that are made of `config.to_dict()`;
- an activation that no stock class knows, for stock classes that are given an attention implementation;
- a tensor named after the scheme, for state dicts that are loaded by hand.
"""
