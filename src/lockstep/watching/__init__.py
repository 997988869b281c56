"""What a run does, and what it takes: where the time goes, who is slow, who is stuck."""
