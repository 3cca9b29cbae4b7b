"""Verifiable rewards, computed in worker processes that can be killed."""
