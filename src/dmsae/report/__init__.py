"""Figures and pages, drawn from what runs and experiments have left on disk."""
