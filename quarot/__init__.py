"""QuaRot: Hadamard rotations so that nothing has outliers, then integers (Ashkboos et al. 2024, arXiv:2404.00456)."""
