"""Memory of a run that ran out of it: measured on the rank, compared with the prediction."""
