"""What we ask of JAX: compilation, devices and hosts, random numbers."""
