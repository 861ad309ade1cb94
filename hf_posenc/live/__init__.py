"""A live model: what it is, what enters its layers, changes that can be undone, and what others put around it."""
