"""What the planner cannot know by itself: this machine, measured, and any model, counted."""
