"""What can be done with a checkpoint that is there: measure, verify, prepack, export, dequantize."""
