"""Single ops in the place of norms, rotary embeddings, gates and plain linears."""
