"""Metaleo: meta-learning with Latent Embedding Optimization (Rusu et al., ICLR 2019)."""

__version__ = "0.1.0"
