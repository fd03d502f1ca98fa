"""Keys and values: the packed cache, attention over it, and room behind transformers' own cache."""
