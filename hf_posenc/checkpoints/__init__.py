"""Model types of their own for patched models: what is saved can never be loaded as something else by mistake.

A patched model has the model type `posenc_<base>`, and classes that are made on demand in front of the stock ones. Five
guards refuse a stock class, each for who gets past the ones before it: the model type (Auto classes), a setting of a
type that no stock config class accepts (stock classes), an attention implementation that is registered nowhere (stock
configs that are made of `config.to_dict()`), an activation that no stock class knows (those that are given an attention
implementation), and a tensor named after the scheme (state dicts that are loaded by hand).
"""
