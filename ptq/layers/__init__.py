"""The modules that a packed model is made of: linear layers, embeddings, and what several of them do together."""
