"""The record of a run in tools of others, beside metrics.jsonl and TensorBoard: Weights & Biases, MLflow."""
