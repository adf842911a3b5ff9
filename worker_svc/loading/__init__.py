"""Snapshots on disk: reading them totally, loudly and no more than needed."""
