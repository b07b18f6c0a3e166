"""Sandboxing of candidates: resource bounds, and the seal around their processes."""
