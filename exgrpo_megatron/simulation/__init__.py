"""A run without a model: the real trainer, buffer and schedule, with pass rates in place of a policy."""
