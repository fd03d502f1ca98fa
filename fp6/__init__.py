"""FP6: weights as small floats of 4 to 7 bits, which need no calibration."""
