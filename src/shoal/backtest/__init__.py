"""The planner held against tables of measured runs: rows → predictions → errors, regret, recall, coverage."""
