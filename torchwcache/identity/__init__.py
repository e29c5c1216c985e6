"""Identity: what a finished module state depends on."""
