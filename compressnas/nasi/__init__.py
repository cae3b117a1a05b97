"""NASI: the cell with the best trace norm of the neural tangent kernel at initialisation (arXiv 2109.00817)."""
