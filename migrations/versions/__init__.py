"""The migrations, one module each, numbered in order."""
