"""Find the rank that hangs, and where: from heartbeats, states of processes and stacks."""
