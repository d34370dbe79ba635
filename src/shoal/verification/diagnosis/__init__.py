"""From what differs to its likely cause."""
