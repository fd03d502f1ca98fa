"""Faster replacements for parts of a loaded model that give the same numbers: norms, attention, layers, experts."""
