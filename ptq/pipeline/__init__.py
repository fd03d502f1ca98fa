"""A run, from MODEL to OUT: tasks that leave files, rotation, rounding, fine-tuning, proofs, and the result on disk."""
