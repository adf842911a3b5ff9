"""Families, and the way from a snapshot folder to a loaded rank."""

from worker_svc.models.decoder import Decoder, Family
from worker_svc.models.load import CheckedSnapshot, check_snapshot, load_model

__all__ = ["CheckedSnapshot", "Decoder", "Family", "check_snapshot", "load_model"]
