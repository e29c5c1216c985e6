"""torchwcache: keep a finished model in memory that outlives every process, and attach it zero-copy."""
