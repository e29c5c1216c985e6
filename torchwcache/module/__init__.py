"""From module to manifest and back."""
