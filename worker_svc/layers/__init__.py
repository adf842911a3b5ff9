"""Layers: what each holds of the checkpoint, how ranks divide it, and which ops it is."""
