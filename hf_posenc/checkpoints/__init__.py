"""Checkpoints of patched models. No stock class loads them by mistake.

A patched model has the model type `posenc_<base>`. Its classes derive from the stock ones and are made on demand. Five
guards keep stock classes from loading its checkpoints. Each stops loaders that pass the guards before it:

- The model type stops Auto classes.
- A setting of a type that no stock config class accepts stops stock classes.
- An attention implementation that is registered nowhere stops stock configs that are made of `config.to_dict()`.
- An activation that no stock class knows stops stock classes for which a caller chooses an attention implementation.
- A tensor named after the scheme stops state dicts that are loaded by hand.
"""
