"""Where the time of a rank goes: a timer of the parts of a step, and of every wait for other ranks."""
