"""Building and running kernels."""
