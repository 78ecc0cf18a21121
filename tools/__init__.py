"""Scripts beside the project: a larger checkpoint, and everything that only a GPU can tell."""
