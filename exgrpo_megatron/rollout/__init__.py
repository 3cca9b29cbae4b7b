"""Rollout engines and the protocol they share."""
