"""The tensor-parallel group."""
