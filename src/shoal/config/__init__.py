"""Settings without torch: recipes, their YAML and command line, and what may change when a run resumes."""
