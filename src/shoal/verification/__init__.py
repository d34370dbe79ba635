"""Compare a plan with one process in float64: losses, gradients, weights, messages and memory."""
