"""Question files, chat template, question order, and the embedded tasks."""
