"""Distilled Matryoshka Sparse Autoencoders.

The modules follow the data: text → tokens → base model → store of activations → SAE → training → attribution → core →
distillation → transfer. Imports point one way along it.
"""

from importlib.metadata import version

__version__ = version("dmsae")
