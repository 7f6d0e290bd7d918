"""A language model is read at one hook point: activations and loss gradients, harvested once, read as one stream."""
