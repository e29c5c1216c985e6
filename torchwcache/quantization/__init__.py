"""The allow-list of quantization methods."""
