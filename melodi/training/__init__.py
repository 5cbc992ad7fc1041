"""Segments to weights: the learner takes the steps, the trainer makes a run of them."""
