"""QuIP#: Hadamard transforms on both sides, E8 lattice codebooks, block-LDLQ (Tseng et al. 2024, arXiv:2402.04396)."""
