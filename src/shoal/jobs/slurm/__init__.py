"""Slurm: the text of an sbatch script, and the programs of the site that submit and follow it."""
