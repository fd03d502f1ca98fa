"""The plan: what will happen to every linear, as pure data, made without reading a weight."""
