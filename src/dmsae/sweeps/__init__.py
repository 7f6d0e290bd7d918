"""Sweeps: jobs that run by themselves, on this machine or a cluster, and how far each has come."""
