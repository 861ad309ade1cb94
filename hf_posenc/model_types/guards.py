"""What a saved config says so that no stock class can be built with it."""

UNREGISTERED = "hf_posenc_patched"
"""`attn_implementation` of a saved config. Stock model classes refuse to be built with it, as it is registered nowhere:
not even where hf_posenc was imported, unlike the name of our attention function."""

ACTIVATION = "hf_posenc:"
"""Put in front of a saved config's activation. Every stock model looks it up when it is built, and finds nothing."""

ACTIVATIONS = ("activation_function", "hidden_act", "hidden_activation")
"""Attributes of configs that name an activation."""
