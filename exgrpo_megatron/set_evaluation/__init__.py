"""Evaluation of a checkpoint on several question sets, with intervals (`eval.sets`, `exgrpo eval`)."""
