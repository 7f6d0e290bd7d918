"""Text becomes packed contexts of tokens."""
