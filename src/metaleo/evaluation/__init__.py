"""How good a learner is: on tasks of unseen classes, and on unseen functions."""
