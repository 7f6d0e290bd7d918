"""The sparse autoencoder: exact sparse algebra, the Matryoshka objective, its gradients and its optimiser."""
