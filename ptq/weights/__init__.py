"""From a weight to codes and bytes: the protocols `Codebook` and `Format`, the table of formats, the two solvers."""
