"""Stored correct answers, their difficulty buckets, and the choice of what to replay."""
