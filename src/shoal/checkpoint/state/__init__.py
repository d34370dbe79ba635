"""The parts of a run that are saved."""
