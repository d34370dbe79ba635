"""Start worker processes, give each its rank, and monitor them. A launcher decides nothing about the run.

Ranks that torchrun, Slurm or MPI started are read by `shoal.comm.rendezvous.launcher_environment`.
"""
