"""What of a run is saved."""
