"""Put schemes into a live model: check the model, plan, list the changes, and hook the layers."""
