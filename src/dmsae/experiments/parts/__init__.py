"""The parts of experiments: each runs for one seed and returns its figures as JSON values."""
