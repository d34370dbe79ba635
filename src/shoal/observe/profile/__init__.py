"""What a profile says: parts of a step that add to the whole, a verdict, and a trace for Perfetto."""
