"""One or several SAEs trained on one stream of activations."""
