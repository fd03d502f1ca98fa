"""transformers: the plug-in that loads packed checkpoints, experts as linears, and parts of a model that run alone."""
