"""How schemes get into a live model and out of it: what is planned, placed, and undone."""
