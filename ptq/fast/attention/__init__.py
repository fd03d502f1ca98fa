"""Attention of prompts and of decoded tokens."""
