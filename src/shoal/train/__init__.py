"""The step, the loop around it, and `Run`, the public object that the command line and a user's own loop stand on."""
