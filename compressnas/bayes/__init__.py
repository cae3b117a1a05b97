"""Sparse Bayesian learning over groups of weights: variance updates, curvature, penalty, the loop over a network."""
