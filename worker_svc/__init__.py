"""The worker: anything that turns arrays into arrays."""
