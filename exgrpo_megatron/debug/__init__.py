"""Bad steps: what makes a step one, the batch that is kept of it, and its loss computed again."""
