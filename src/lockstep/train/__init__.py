"""Training around the step."""
