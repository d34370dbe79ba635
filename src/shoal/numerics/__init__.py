"""Precision, initial values, gradients, optimizers, operators and kernels."""
