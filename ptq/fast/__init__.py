"""What a loaded model does in another way, to the same numbers: norms, attention, whole layers, mixers, experts."""
