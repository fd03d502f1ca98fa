"""What calibration text tells: rows of tokens, Hessians, clips of quantised inputs, outliers."""
