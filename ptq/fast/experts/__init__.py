"""Routers and their experts."""
