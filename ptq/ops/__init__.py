"""The ops of `torch.ops.ptq`: schema, fake kernel and reference of each, the layouts that kernels read, and where the
kernels are found. Knows no model and no format."""
