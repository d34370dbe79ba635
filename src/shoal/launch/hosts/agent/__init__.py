"""The side of one host: the agent, its template with torch loaded, and the runner of the workers."""
