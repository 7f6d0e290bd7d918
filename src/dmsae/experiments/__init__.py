"""Experiments: questions about the method, each declared in one file and answered by runs that can be resumed."""
