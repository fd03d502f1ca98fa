"""What stands in the place of attention: delta nets, state spaces."""
