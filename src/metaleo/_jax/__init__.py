"""Helpers around JAX: compilation, devices and hosts, random numbers."""
