"""Whole decoder layers, and several of them, in one call."""
