"""Find plans that fit a cluster, rank them by predicted time, and explain the choice. Without torch."""
