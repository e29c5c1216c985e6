"""Parity across processes: a fresh load in one, a fresh attach in another, compared by descriptions. See ``torchwcache verify``."""
