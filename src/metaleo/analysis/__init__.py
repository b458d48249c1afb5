"""Quantitative analyses of trained models: latent codes, curvature, coverage and uncertainty (Sections 4.5 and 4.6)."""
