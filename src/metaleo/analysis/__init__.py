"""What a model has learned: codes, curvature, coverage and certainty (Sections 4.5 and 4.6), as numbers."""
