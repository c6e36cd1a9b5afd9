"""The control thread of a rank: one select loop that owns the replica and always reads."""
