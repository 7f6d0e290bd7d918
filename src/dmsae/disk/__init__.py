"""What is on disk: whole files, sealed artifacts, checkpoints, run directories, and every name in them."""
