"""Other plans than the one at hand: all single changes of it, the nearest that fits, and the next worth trying."""
