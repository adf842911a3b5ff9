"""The scheduler: anything that chooses, counts, remembers or refuses."""
