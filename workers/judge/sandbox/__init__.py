"""The sandbox of candidates: resource limits, and the seal around their processes."""
