"""When a run saves and how it resumes: intervals, the run directory, the memory tier."""
