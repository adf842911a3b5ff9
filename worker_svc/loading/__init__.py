"""From a Hugging Face snapshot to a rank's own tensors."""
