"""Tests of rollouts by vLLM; without it each is skipped and says so."""
