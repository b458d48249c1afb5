"""Trained models as scikit-learn estimators: `fit` adapts them to the few examples at hand."""
