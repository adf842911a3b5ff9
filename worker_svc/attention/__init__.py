"""Attention over the paged cache, cut at absolute positions."""
