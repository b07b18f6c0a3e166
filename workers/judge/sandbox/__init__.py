"""What a candidate may do: how its process is started, sealed, bounded and ended."""
