"""A problem → the initial parameters of its classifier: encode (Eq. 3), then decode (Eq. 4)."""
