"""Evaluation of learners on tasks of unseen classes, and on unseen functions."""
