"""Ways to read a checkpoint into a module."""
