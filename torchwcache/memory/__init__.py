"""Memory that has a file descriptor, and so outlives its maker."""
