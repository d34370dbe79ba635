"""Kubernetes: the objects of a job as YAML, and kubectl, which submits and follows it."""
